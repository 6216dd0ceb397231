"""Configurations and options of `fit` and `plan` that make no sense end in one clear line and leave no file."""

import pytest
import torch

from helpers.refusals import assert_refused, make_bench, rows, text
from helpers.text_files import write_jsonl
from helpers.tiny_models import random_masks, tiny_llama
from roi_lightning.models.source import resolve_model

bench = pytest.fixture(make_bench)


def fit(bench, path):
    return ["fit", *bench.lean("-c", path)]


def plan(bench, path):
    return ["plan", *bench.lean("-c", path)]


def overrides(*words):
    """No file: what is typed at the end of the command line of `fit`."""
    return lambda bench: words


def fit_with(bench, words):
    return ["fit", *bench.lean(*words)]


def plan_with(bench, words):
    return ["plan", *bench.lean(*words)]


def yaml(content):
    return text("bad.yaml", content)


def prior_of(model, pattern="2:4"):
    """A mask file of a model that a function of the bench gives."""

    def make(bench):
        path = bench.folder / "mask.safetensors"
        random_masks(resolve_model(str(model(bench))), pattern).save(path)
        return ["--model.prior", path]

    return make


def short_corpus(bench):
    # Valid YAML, too: not to be taken for the corpus's name.
    return ["--data.corpora", write_jsonl(bench.folder / "s.jsonl", ["so short"] * 2)]


TABLE = {
    # Files that are no configuration.
    "binary": (yaml(bytes(range(256))), fit, r"bad\.yaml' can't be read: 'utf-8'.*give a YAML file"),
    "deep nesting": (
        yaml("a: " + "[" * 3000 + "]" * 3000),
        plan,
        r"bad\.yaml': can't be read: .*recursion depth.*give a YAML file",
    ),
    # Names.
    "an unknown overlay": (
        lambda bench: "overlays/maskllmm.yaml",
        plan,
        "did you mean overlays/maskllm",
    ),
    "another strategy": (
        yaml("trainer: {strategy: {class_path: lightning.pytorch.strategies.ModelParallelStrategy}}\n"),
        fit,
        "ModelParallelStrategy; choose .*overlays/fsdp2.yaml",
    ),
    "fit from a word": (overrides("--ckpt_path", "last"), fit_with, "no checkpoint at 'last'"),
    "plan of nothing": (
        overrides("--model.lm", "./nowhere"),
        plan_with,
        "model './nowhere' is no directory",
    ),
    "a directory mistyped": (
        lambda bench: (bench.write("tinyqwen/config.json", "{}"), ["--model.lm", "tinyqwn"])[1],
        plan_with,
        "files; no directory .* mean tinyqwen.; unset HF_HUB_OFFLINE; without network give .* smollm2-135m",
    ),
    "a section": (yaml("modle: {init_args: {pattern: 1:4}}\n"), plan, "bad.yaml.*modle.*mean model."),
    "init_args": (yaml("model: {init_arg: {pattern: 1:4}}\n"), plan, "bad.yaml.* mean init_args."),
    "a key of the text": (yaml("data: {seqlen: 32}\n"), plan, "bad.yaml.* did you mean seq_len."),
    "a key of the trainer": (yaml("trainer: {max_step: 2}\n"), plan, "bad.yaml.* mean trainer.max_steps"),
    "a dtype's short name": (overrides("--model.dtype", "bf16"), plan_with, "bf16; did you mean bfloat16."),
    # Patterns, priors and text.
    "no pattern": (
        overrides("--model.pattern", "dense"),
        fit_with,
        "pattern 'dense' is not of the form N:M",
    ),
    "unknown prior": (
        overrides("--model.prior", "wandda"),
        fit_with,
        "none of none, magnitude, activation",
    ),
    "prior of another model": (
        prior_of(lambda bench: tiny_llama(bench.folder / "other")),
        fit_with,
        "another model",
    ),
    "prior of another pattern": (prior_of(lambda bench: bench.model, "1:4"), fit_with, "1:4.*2:4"),
    "short corpus": (short_corpus, fit_with, "only 16 tokens, one window needs 32"),
    "5:4 unquoted": (yaml("model: {init_args: {pattern: 5:4}}\n"), fit, "pattern 5:4 is impossible"),
    # Numbers.
    "seq_len past the model": (overrides("--data.seq_len", "4096"), fit_with, "reads at most 128"),
    "half a micro-batch": (
        overrides("--data.windows_per_step", "3", "--trainer.accumulate_grad_batches", "null"),
        fit_with,
        "windows_per_step is 3, no multiple of 1 x 2 .*; set it to 2 or 4 or data.batch_size to 1",
    ),
    "windows for fewer devices": (
        overrides(
            *("--data.windows_per_step", "8", "--trainer.accumulate_grad_batches", "null"),
            *("--trainer.devices", "8"),
        ),
        plan_with,
        "windows_per_step is 8, no multiple of 8 x 2 .*; set it to 16 or data.batch_size to 1",
    ),
    "τ of NaN": (overrides("--model.tau.start", ".nan"), plan_with, "positive number, got start nan"),
    "prior_strength of NaN": (
        overrides("--model.prior_strength", ".nan"),
        plan_with,
        "prior_strength is nan",
    ),
    "prior_margin without a prior": (
        overrides("--model.prior", "none", "--model.prior_margin", "0.1"),
        plan_with,
        "no prior to lean to",
    ),
    "no end": (yaml("trainer: {max_steps: null}\n"), fit, "trainer.max_steps is None; set it"),
    "a trainer without options": (yaml("trainer: 124\n"), fit, "trainer holds no options"),
    "a zero byte": (yaml('trainer: "\\0"\n'), fit, "embedded null byte; give another"),
    "a negative clip": (
        overrides("--trainer.gradient_clip_val", "-1"),
        plan_with,
        r"gradient_clip_val is -1(\.0)?; give at least 0",
    ),
    "validation too rare": (
        overrides("--trainer.val_check_interval", "1000"),
        fit_with,
        "val_check_interval is 1000, and the run has 4",
    ),
    "bf16-true, before any text is read": (
        overrides("--trainer.precision", "bf16-true", "--data.corpora", "nowhere.jsonl"),
        fit_with,
        "would round the logits",
    ),
    "16-true, planned": (overrides("--trainer.precision", "16-true"), plan_with, "would round the logits"),
    "no targets": (overrides("--model.targets", "[]"), plan_with, "leaves no layer"),
    "a size of nothing": (overrides("--fit_in", "much"), plan_with, "--fit_in 'much' is no size"),
    # Overlays that contradict.
    "ProxSparse at 1:4": (
        lambda bench: "overlays/proxsparse.yaml",
        lambda bench, path: ["fit", *bench.lean("-c", path, "--model.pattern", "1:4")],
        "learns 2:4 only",
    ),
    "MaskLLM with a toggle": (
        overrides("--trainer.callbacks", "StraightThroughToggle", "--trainer.callbacks.at_step", "3"),
        lambda bench, words: ["fit", *bench.lean("-c", "overlays/maskllm.yaml", *words)],
        "StraightThroughToggle works on",
    ),
    "MaskLLM at 8:32": (
        lambda bench: "overlays/maskllm.yaml",
        lambda bench, path: ["fit", *bench.lean("-c", path, "--model.pattern", "8:32")],
        "8:32 has 10,518,300 .*use GumbelTopK",
    ),
}
if not torch.cuda.is_available():
    TABLE["a TPU"] = (
        overrides("--trainer.accelerator", "tpu"),
        fit_with,
        "for .*'tpu'; set it to auto or cpu",
    )
    TABLE["no GPU"] = (overrides("--trainer.accelerator", "gpu"), fit_with, "no CUDA GPU for .*'gpu'; set it")


@rows(TABLE)
def test_refused(bench, capsys, make, command, says):
    made = make(bench)
    assert_refused(bench, capsys, command(bench, made), says, made)
