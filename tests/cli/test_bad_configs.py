"""Configurations and overrides that make no sense, given to `fit` and `plan`."""

import pytest

from refusals import assert_refused, make_bench, rows, text

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


def folder(bench):
    (bench.folder / "configs.yaml").mkdir()
    return "configs.yaml"


TABLE = {
    # Files that are no configuration.
    "binary": (yaml(bytes(range(256))), fit, r"bad\.yaml' can't be read: 'utf-8'.*give a YAML file"),
    "a tab": (yaml("model:\n\tpattern: 2:4\n"), plan, r"bad\.yaml': Problems parsing .*token"),
    "a folder": (folder, plan, r"no configuration 'configs\.yaml'.*or the name of one in"),
    "deep nesting": (
        yaml("a: " + "[" * 3000 + "]" * 3000),
        plan,
        r"bad\.yaml' can't be read: .*recursion depth.*give a YAML file",
    ),
    "code": (
        yaml("model: !!python/object/apply:os.system [touch hacked]\n"),
        plan,
        r"bad\.yaml'.*python/object/apply:os.system",
    ),
    # Names.
    "a typo at the top": (yaml("modl: {pattern: 3}\n"), plan, "modl"),
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
    # Patterns.
    "5:4 unquoted": (yaml("model: {init_args: {pattern: 5:4}}\n"), fit, "pattern 5:4 is impossible"),
    "no pattern": (
        yaml("model: {init_args: {pattern: null}}\n"),
        plan,
        "pattern None is not of the form N:M",
    ),
    "an endless pattern": (
        overrides("--model.pattern", f"1:1{'0' * 5000}"),
        plan_with,
        "pattern '1:10{30,} is not of the form",
    ),
    "a pattern of sixty": (
        overrides("--model.pattern", "59:4000000000"),
        plan_with,
        "'59:4000000000' is not of the form N:M",
    ),
    # Numbers.
    "seq_len 0": (overrides("--data.seq_len", "0"), fit_with, "data.seq_len is 0"),
    "seq_len 1": (overrides("--data.seq_len", "1"), plan_with, "data.seq_len is 1"),
    "seq_len endless": (
        overrides("--data.seq_len", "1" + "0" * 30),
        plan_with,
        "seq_len is 10{30} and .* at most 128 tokens",
    ),
    "seq_len past the model": (overrides("--data.seq_len", "4096"), fit_with, "reads at most 128"),
    "batch_size 0": (overrides("--data.batch_size", "0"), plan_with, "data.batch_size is 0"),
    "accumulation 0": (
        overrides("--trainer.accumulate_grad_batches", "0"),
        fit_with,
        "accumulate_grad_batches is 0; give at least 1",
    ),
    "no windows in a step": (
        overrides("--data.windows_per_step", "0"),
        plan_with,
        "data.windows_per_step is 0",
    ),
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
    "validation every 0 steps": (
        overrides("--trainer.validate_every_steps", "0"),
        plan_with,
        "trainer.validate_every_steps is 0",
    ),
    "a negative last rate": (overrides("--model.lr_end", "-1"), plan_with, "model.lr_end is -1"),
    "τ of NaN": (overrides("--model.tau.start", ".nan"), plan_with, "positive number, got start nan"),
    "a fraction of zero": (overrides("--model.tau.fraction", "0"), plan_with, "fraction is 0.0; set it"),
    "init_std of NaN": (overrides("--model.init_std", ".nan"), fit_with, "model.init_std is nan"),
    "prior_strength of NaN": (
        overrides("--model.prior_strength", ".nan"),
        plan_with,
        "prior_strength is nan",
    ),
    "prior_margin below 0": (overrides("--model.prior_margin", "-0.1"), plan_with, "prior_margin is -0.1"),
    "prior_margin without a prior": (
        overrides("--model.prior", "none", "--model.prior_margin", "0.1"),
        plan_with,
        "no prior to lean to",
    ),
    "no prior windows": (overrides("--model.prior_windows", "0"), plan_with, "prior_windows is 0"),
    "kept_norm of NaN": (overrides("--model.kept_norm", ".nan"), plan_with, "model.kept_norm is nan"),
    "distillation of 2": (overrides("--model.distillation", "2"), plan_with, "model.distillation is 2"),
    "a held-out share of NaN": (
        overrides("--data.held_out_fraction", ".nan"),
        plan_with,
        "held_out_fraction is nan",
    ),
    "a negative seed": (
        overrides("--seed_everything", "-1"),
        plan_with,
        "-1 is not in bounds.*give another value",
    ),
    "no end": (yaml("trainer: {max_steps: null}\n"), fit, "trainer.max_steps is None; set it"),
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
    "bf16-true": (overrides("--trainer.precision", "bf16-true"), fit_with, "would round the logits"),
    "no targets": (overrides("--model.targets", "[]"), plan_with, "leaves no layer"),
    "a size of nothing": (overrides("--fit_in", "much"), plan_with, "--fit_in 'much' is no size"),
    "masks every 0 steps": (
        overrides("--trainer.callbacks", "HardenMasks", "--trainer.callbacks.every_n_steps", "0"),
        plan_with,
        "every_n_steps is 0",
    ),
    "a summary of no windows": (
        overrides("--trainer.callbacks", "BaselineSummary", "--trainer.callbacks.windows", "0"),
        fit_with,
        "BaselineSummary.windows is 0",
    ),
    # Overlays that contradict.
    "ProxSparse at 1:4": (
        lambda bench: "overlays/proxsparse.yaml",
        lambda bench, path: ["fit", *bench.lean("-c", path, "--model.pattern", "1:4")],
        "learns 2:4 only",
    ),
    "ProxSparse, then MaskLLM": (
        lambda bench: "overlays/maskllm.yaml",
        lambda bench, path: ["fit", *bench.lean("-c", "overlays/proxsparse.yaml", "-c", path)],
        "Option 'lam.init_args.start'",
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


@rows(TABLE)
def test_refused(bench, capsys, make, command, says):
    made = make(bench)
    assert_refused(bench, capsys, command(bench, made), says, made)
