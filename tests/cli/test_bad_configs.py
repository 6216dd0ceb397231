"""Configurations and overrides that make no sense, given to `fit` and `plan`."""

import pytest

from refusals import assert_refused, make_bench, rows, text

bench = pytest.fixture(make_bench)


def fit(bench, path):
    return ["fit", *bench.lean("-c", path)]


def fit_alone(bench, path):
    return ["fit", "-c", path]


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
    "an empty file alone": (yaml(""), fit_alone, r"bad\.yaml': Unexpected config"),
    "a list": (yaml("- 1\n- 2\n"), plan, r"bad\.yaml': Unexpected config: - 1"),
    "a word": (yaml("quickstart"), plan, r"bad\.yaml': Unexpected config: quickstart"),
    "a number": (yaml("124"), plan, r"bad\.yaml': Unexpected config: 124"),
    "binary": (yaml(bytes(range(256))), fit, r"bad\.yaml' can't be read: 'utf-8'.*give a YAML file"),
    "invalid UTF-8": (
        yaml(b"model: \xff\xfe\n"),
        plan,
        r"bad\.yaml' can't be read: 'utf-8'.*give a YAML file",
    ),
    "a tab": (yaml("model:\n\tpattern: 2:4\n"), plan, r"bad\.yaml': Problems parsing .*token"),
    "a mask file": (lambda bench: bench.mask, plan, "good_mask.* can't be read: 'utf-8'.*give a YAML file"),
    "a folder": (folder, plan, r"no configuration 'configs\.yaml'.*a name like"),
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
    "a typo in the model": (yaml("model: {init_args: {patern: '2:4'}}\n"), fit, "patern"),
    "a typo in the data": (yaml("data: {seqlen: 3}\n"), plan, "seqlen"),
    "an unknown learner": (yaml("model: {class_path: Learner}\n"), plan, "Learner"),
    "a class that is no learner": (yaml("model: {class_path: torch.nn.Linear}\n"), plan, "Linear"),
    "a module that is not there": (yaml("model: {class_path: nowhere.Learner}\n"), plan, "nowhere"),
    "an unknown callback": (yaml("trainer: {callbacks: [{class_path: Harden}]}\n"), plan, "Harden"),
    "an unknown option of a callback": (
        yaml("trainer: {callbacks: [{class_path: HardenMasks, init_args: {every: 3}}]}\n"),
        plan,
        "Option 'every'",
    ),
    "an unknown overlay": (
        lambda bench: "overlays/maskllmm.yaml",
        plan,
        "did you mean overlays/maskllm.yaml",
    ),
    "an unknown schedule": (overrides("--model.tau", "Sawtooth"), plan_with, "Sawtooth"),
    "an unknown optimizer": (overrides("--model.optimizer", "Adammm"), plan_with, "Adammm"),
    "an unknown option of the optimizer": (
        overrides("--model.optimizer.rate", "3"),
        plan_with,
        "Option 'rate'",
    ),
    "an unknown dtype": (overrides("--model.dtype", "float8"), plan_with, "dtype.*value: float8"),
    "an unknown precision": (overrides("--trainer.precision", "3"), plan_with, "trainer.precision.*value: 3"),
    "an unknown accelerator": (
        overrides("--trainer.accelerator", "abacus"),
        fit_with,
        "invalid accelerator name.*abacus.*cpu",
    ),
    "another strategy": (
        yaml("trainer: {strategy: {class_path: lightning.pytorch.strategies.ModelParallelStrategy}}\n"),
        fit,
        "ModelParallelStrategy; choose .*overlays/fsdp2.yaml",
    ),
    "an unknown strategy": (
        overrides("--trainer.strategy", "divide"),
        fit_with,
        "invalid strategy name.*divide",
    ),
    # Patterns.
    "2:4 unquoted, another number": (
        yaml("model: {init_args: {pattern: 124.5}}\n"),
        plan,
        "pattern.*value: 124.5",
    ),
    "5:4 unquoted": (yaml("model: {init_args: {pattern: 5:4}}\n"), fit, "pattern 5:4 is impossible"),
    "0:4 unquoted": (yaml("model: {init_args: {pattern: 0:4}}\n"), plan, "pattern 0:4 is impossible"),
    "a pattern of four parts": (
        yaml("model: {init_args: {pattern: 1:2:3:4}}\n"),
        plan,
        "pattern 3723:4 is impossible",
    ),
    "a pattern as a list": (
        yaml("model: {init_args: {pattern: [2, 4]}}\n"),
        plan,
        r"pattern.*value: \[2, 4\]",
    ),
    "a pattern as a mapping": (
        yaml("model: {init_args: {pattern: {2: 4}}}\n"),
        plan,
        "pattern.*value: {2: 4}",
    ),
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
        "data.seq_len is 10{30} and .* at most 128 tokens",
    ),
    "seq_len past the model": (overrides("--data.seq_len", "4096"), fit_with, "reads at most 128"),
    "seq_len a fraction": (overrides("--data.seq_len", "3.5"), plan_with, "seq_len.*value: 3.5"),
    "seq_len a list": (yaml("data: {seq_len: [32]}\n"), plan, r"seq_len.*value: \[32\]"),
    "batch_size 0": (overrides("--data.batch_size", "0"), plan_with, "data.batch_size is 0"),
    "batch_size -1": (overrides("--data.batch_size", "-1"), plan_with, "data.batch_size is -1"),
    "accumulation 0": (
        overrides("--trainer.accumulate_grad_batches", "0"),
        fit_with,
        "accumulate_grad_batches is 0; set it",
    ),
    "accumulation -2": (
        overrides("--trainer.accumulate_grad_batches", "-2"),
        plan_with,
        "accumulate_grad_batches is -2; set it",
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
    "a negative learning rate": (
        overrides("--model.optimizer.lr=-1e-3"),
        fit_with,
        "model.optimizer.*learning rate: -0.001",
    ),
    "a learning rate of NaN": (
        overrides("--model.optimizer.lr", ".nan"),
        plan_with,
        "model.optimizer.*learning rate: nan",
    ),
    "an infinite learning rate": (
        overrides("--model.optimizer.lr", ".inf"),
        plan_with,
        "model.optimizer has lr inf",
    ),
    "a learning rate of zero": (
        overrides("--model.optimizer.lr", "0"),
        plan_with,
        "model.optimizer has lr 0.0",
    ),
    "a negative last rate": (overrides("--model.lr_end", "-1"), plan_with, "model.lr_end is -1"),
    "a last rate of NaN": (overrides("--model.lr_end", ".nan"), plan_with, "model.lr_end is nan"),
    "a beta of 2": (
        overrides("--model.optimizer.betas", "[2, 0.9]"),
        plan_with,
        "model.optimizer.*beta .*: 2.0",
    ),
    "τ of NaN": (overrides("--model.tau.start", ".nan"), plan_with, "positive number, got start nan"),
    "λ of infinity": (overrides("--model.lam.end", ".inf"), plan_with, "end inf"),
    "a negative τ": (overrides("--model.tau.start", "-1"), plan_with, "start -1"),
    "τ a word": (overrides("--model.tau.start", "hot"), plan_with, "start.*value: hot"),
    "a fraction of zero": (overrides("--model.tau.fraction", "0"), plan_with, "fraction is 0.0; set it"),
    "a fraction of NaN": (overrides("--model.tau.fraction", ".nan"), plan_with, "fraction is nan; set it"),
    "init_std of NaN": (overrides("--model.init_std", ".nan"), fit_with, "model.init_std is nan"),
    "an infinite init_std": (overrides("--model.init_std", ".inf"), plan_with, "model.init_std is inf"),
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
    "distillation of NaN": (overrides("--model.distillation", ".nan"), plan_with, "distillation is nan"),
    "a held-out share of NaN": (
        overrides("--data.held_out_fraction", ".nan"),
        plan_with,
        "held_out_fraction is nan",
    ),
    "a negative seed": (overrides("--seed_everything", "-1"), plan_with, "seed_everything is -1; set it"),
    "a huge seed": (
        overrides("--seed_everything", "1" + "0" * 30),
        plan_with,
        "seed_everything is 10{30}; set it",
    ),
    "a seed that is a word": (
        overrides("--seed_everything", "luck"),
        plan_with,
        "seed_everything.*value: luck",
    ),
    "no end": (yaml("trainer: {max_steps: null}\n"), fit, "trainer.max_steps is None; set it"),
    "no trainer": (yaml("trainer: null\n"), plan, "trainer.max_steps is None"),
    "no model": (yaml("model: null\n"), plan, "required: model"),
    "an end of -1": (overrides("--trainer.max_steps", "-1"), plan_with, "trainer.max_steps is -1"),
    "an end of zero": (overrides("--trainer.max_steps", "0"), plan_with, "trainer.max_steps is 0"),
    "an end of -7": (overrides("--trainer.max_steps", "-7"), plan_with, "trainer.max_steps is -7; set it"),
    "no devices": (overrides("--trainer.devices", "0"), fit_with, "devices='0'"),
    "devices a word": (overrides("--trainer.devices", "many"), fit_with, "devices.* should be an int > 0"),
    "more nodes than none": (overrides("--trainer.num_nodes", "0"), fit_with, "num_nodes.* but got 0"),
    "a negative clip": (
        overrides("--trainer.gradient_clip_val", "-1"),
        plan_with,
        r"gradient_clip_val is -1(\.0)?; set it",
    ),
    "an unknown clip": (
        overrides("--trainer.gradient_clip_algorithm", "barber"),
        fit_with,
        "gradient_clip_algorithm` barber .*'norm'",
    ),
    "validation never": (
        overrides("--trainer.val_check_interval", "-1"),
        fit_with,
        "value -1 for val_check_interval",
    ),
    "validation too rare": (
        overrides("--trainer.val_check_interval", "1000"),
        fit_with,
        "val_check_interval is 1000, and the run has 4",
    ),
    "bf16-true": (overrides("--trainer.precision", "bf16-true"), fit_with, "would round the logits"),
    "no targets": (overrides("--model.targets", "[]"), plan_with, "leaves no layer"),
    "all ignored": (overrides("--model.ignore", "['*']"), plan_with, "leaves no layer"),
    "targets a number": (overrides("--model.targets", "3"), plan_with, "targets.*value: 3"),
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
    "ProxSparse, then straight-through": (
        lambda bench: "overlays/straight_through.yaml",
        lambda bench, path: ["fit", *bench.lean("-c", "overlays/proxsparse.yaml", "-c", path)],
        "Option 'sampler'",
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
    # Command lines.
    "no configuration": (overrides("fit"), lambda bench, words: [*words], "no model to learn on"),
    "an option without its value": (overrides("--model.pattern"), plan_with, "expected one argument"),
    "an unknown option": (overrides("--model.patern", "2:4"), plan_with, "Option 'patern'"),
}


# What the parser's types refuse and numbers out of range, where a row of the same check is left.
SLOW = {
    *("a word", "a number", "invalid UTF-8", "a mask file", "a typo in the model", "a typo in the data"),
    *(
        "an unknown callback",
        "an unknown optimizer",
        "an unknown option of the optimizer",
        "an unknown precision",
    ),
    *("an unknown strategy", "0:4 unquoted", "a pattern of four parts", "a pattern as a mapping"),
    *(
        "seq_len a fraction",
        "seq_len a list",
        "batch_size -1",
        "accumulation -2",
        "an infinite learning rate",
    ),
    *("a learning rate of zero", "a last rate of NaN", "λ of infinity", "a negative τ", "τ a word"),
    *(
        "a fraction of NaN",
        "an infinite init_std",
        "distillation of NaN",
        "a huge seed",
        "a seed that is a word",
    ),
    *(
        "no trainer",
        "an end of -1",
        "an end of -7",
        "devices a word",
        "more nodes than none",
        "an unknown clip",
    ),
    *("targets a number", "all ignored", "a beta of 2", "validation never"),
}


@rows(TABLE, SLOW)
def test_refused(bench, capsys, make, command, says):
    made = make(bench)
    assert_refused(bench, capsys, command(bench, made), says, made)
