"""The shipped configurations: they fit the code's signatures, the paper's numbers, and any folder."""

import math
import re
import runpy
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import yaml

from helpers.lab import make_lab, run
from helpers.refusals import make_bench
from roi_lightning.cli.config_files import find_config, shipped_configs, with_extended
from roi_lightning.cli.lightning import build
from roi_lightning.errors import UserError
from roi_lightning.learning.callbacks import BaselineSummary, HardenMasks, MaskMonitor, SparseExport
from roi_lightning.masks.pattern import NMPattern
from roi_lightning.reports.callback import Report
from roi_lightning.samplers import Categorical, Draw, GumbelSubset, GumbelTopK, StraightThrough
from roi_lightning.samplers.schedules import Constant, Exponential, Linear

lab, bench = pytest.fixture(make_lab), pytest.fixture(make_bench)
ROOT = Path(__file__).resolve().parents[2]
# recover.yaml wants an export and learns no mask: tests/learning/test_recover.py has it.
BASES = sorted(path.name for path in (ROOT / "configs").glob("*.yaml") if path.name != "recover.yaml")
OVERLAYS = sorted(path.name for path in (ROOT / "configs" / "overlays").glob("*.yaml"))
PACKAGES = {
    "adamw8bit.yaml": "torchao",
    "one_24gb_gpu.yaml": "torchao",
    "wandb.yaml": "wandb",
}


def instantiate(*args):
    return build([str(arg) for arg in args])


# The others differ from these in the model's name.
FEW = (
    "quickstart.yaml",
    "qwen0.5b_2of4.yaml",
    "qwen3b_2of8.yaml",
    "gemma2_9b_2of4.yaml",
    "smollm2_135m_2of4.yaml",
)


@pytest.mark.parametrize(
    "name", [name if name in FEW else pytest.param(name, marks=pytest.mark.slow) for name in BASES]
)
def test_every_configuration_instantiates(lab, name):
    cli = instantiate("--config", name, "--model.lm", lab.model)
    cli.model.preflight(cli.trainer)
    assert cli.datamodule.tokenizer == str(lab.model)
    wanted = {HardenMasks, SparseExport, BaselineSummary, MaskMonitor, Report}
    assert wanted <= {type(callback) for callback in cli.trainer.callbacks}
    assert cli.model.teacher is None, "nothing is loaded yet"
    if name != "quickstart.yaml":
        assert str(cli.model.pattern) == name.split("_")[-1].removesuffix(".yaml").replace("of", ":")
        check_the_papers_numbers(cli.model, cli.datamodule, cli.trainer)


def check_the_papers_numbers(model, data, trainer):
    assert trainer.max_steps == 2000
    assert all(data.micro_batches(ranks) * ranks * data.batch_size == 256 for ranks in (1, 2, 8, 16))
    assert data.seq_len == 4096
    for schedule, end in ((model.tau, 0.05), (model.lam, 0.002)):
        assert isinstance(schedule, Exponential)
        assert schedule.at(0, 2000) == 1
        assert schedule.at(1499, 2000) > end
        assert schedule.at(1500, 2000) == schedule.at(2000, 2000) == pytest.approx(end)
        assert schedule.at(750, 2000) == pytest.approx(end**0.5)
    optimizer = model.optimizer([torch.nn.Parameter(torch.zeros(1))])
    assert type(optimizer) is torch.optim.AdamW
    wanted = {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.05}
    group = optimizer.param_groups[0]
    assert {key: tuple(group[key]) if key == "betas" else group[key] for key in wanted} == wanted
    assert model.lr_end == 1e-4
    assert model.start.init_std == 0.01
    assert model.start.prior == "none"
    assert model.sampler == GumbelTopK()
    assert trainer.precision == "32-true"
    assert trainer.validate_every_steps == 250


LATE = {"wandb.yaml": [pytest.mark.slow]}  # its package takes seconds to import


@pytest.mark.parametrize("overlay", [pytest.param(name, marks=LATE.get(name, ())) for name in OVERLAYS])
@pytest.mark.parametrize(
    "base", [pytest.param("quickstart.yaml", marks=pytest.mark.slow), "qwen0.5b_2of4.yaml"]
)
def test_every_overlay_instantiates_on_a_base(lab, base, overlay):
    package = PACKAGES.get(overlay)
    if package and find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    more = ["--model.strength", "1"] if overlay == "proxsparse.yaml" else []
    cli = instantiate("-c", base, "-c", f"overlays/{overlay}", "--model.lm", lab.model, *more)
    cli.model.preflight(cli.trainer)


def test_what_the_overlays_change(lab):
    start = ["-c", "qwen0.5b_2of4", "--model.lm", lab.model]
    straight = instantiate(*start, "-c", "overlays/straight_through", "--model.targets", "q_proj").model
    assert (type(straight.sampler), straight.targets) == (StraightThrough, ["q_proj"])
    model = instantiate(*start, "-c", "overlays/linear_anneal.yaml").model
    assert (model.tau, model.lam) == (Linear(1.0, 0.05, 0.75), Linear(1.0, 0.002, 0.75))
    small = instantiate(*start, "-c", "overlays/small_budget.yaml", "-c", "overlays/gumbel_subset.yaml")
    assert (small.model.sampler, small.model.tau) == (GumbelSubset(), Linear(10.0, 3.0, 0.9))
    assert small.model.lam == Constant(0.0005)
    small.trainer.count_micro_batches(small.datamodule)
    assert (small.trainer.accumulate_grad_batches, small.datamodule.batch_size) == (4, 1)
    assert small.trainer.val_check_interval == 50 * 4
    assert small.trainer.max_steps * 4 * small.datamodule.seq_len < 1e6
    assert small.model.start.prior == "activation"
    assert 0 < small.model.distillation < 1
    linear = instantiate(*start, "-c", "overlays/small_budget.yaml").model
    assert (linear.tau, linear.lam) == (Linear(0.2, 0.05, 0.75), Linear(0.005, 0.002, 0.75))
    papers = instantiate(
        *start, "-c", "overlays/small_budget.yaml", "-c", "overlays/exponential_anneal.yaml"
    ).model
    assert (papers.tau, papers.lam) == (Exponential(0.2, 0.05, 0.75), Exponential(0.005, 0.002, 0.75))
    assert model.distillation == 0, "the paper learns from the text alone"


@pytest.mark.parametrize(("recipe", "tokens"), [("million_tokens", 0.9216e6), ("gpu", 49.152e6)])
def test_settings_go_by_the_number_of_steps(lab, recipe, tokens):
    cli = instantiate("-c", f"recipes/{recipe}.yaml", "--model.lm", lab.model)
    model, data, steps = cli.model, cli.datamodule, cli.trainer.max_steps
    assert steps * data.windows_per_step * data.seq_len == tokens
    strength = model.start.prior_strength
    lr = model.optimizer([torch.zeros(1, requires_grad=True)]).defaults["lr"]
    assert lr == pytest.approx(strength / math.sqrt(steps), rel=0.01)
    assert model.lr_end == pytest.approx(lr / 10)
    assert [model.lam.at(step, steps) for step in (0, steps)] == pytest.approx([strength / 30] * 2)
    assert model.start.init_std == pytest.approx(strength / 5)
    assert (model.sampler, model.tau) == (GumbelSubset(), Linear(10.0, 3.0, 0.9))


def test_a_million_tokens_from_a_prior_that_draws_hardly_leave(lab):
    cli = instantiate("-c", "recipes/million_tokens.yaml", "--model.lm", lab.model)
    model, strength = cli.model, cli.model.start.prior_strength
    logits = torch.tensor([strength, strength, -strength, -strength]).repeat(1000)[None]
    ones, prior = torch.ones_like(logits), (logits > 0).float()
    last = cli.trainer.max_steps
    for step in (0, last):
        draw = Draw.of(0, 0, "layer", model.lam.at(step, last), model.tau.at(step, last))
        drawn = model.sampler.masked_weight(ones, logits, model.pattern, draw)
        assert (drawn - prior).abs().max() < 0.05


def test_paper_plus_is_the_papers_recipe_with_two_changes(lab):
    cli = instantiate("-c", "recipes/paper_plus.yaml", "--model.lm", lab.model)
    check_the_papers_numbers(cli.model, cli.datamodule, cli.trainer)
    assert cli.model.distillation == 0.5
    sources = [corpus.source for corpus in cli.datamodule.corpora]
    assert sources == ["HuggingFaceFW/fineweb-edu", "wikimedia/wikipedia"]
    assert len({corpus.weight for corpus in cli.datamodule.corpora}) == 1


def test_one_24gb_gpu_changes_memory_and_no_number_of_windows(lab):
    pytest.importorskip("torchao")
    cli = instantiate("-c", "qwen1.5b_2of4", "-c", "overlays/one_24gb_gpu", "--model.lm", lab.model)
    assert cli.model.activation_checkpointing
    assert (cli.datamodule.batch_size, cli.datamodule.micro_batches(1)) == (1, 256)
    optimizer = cli.model.optimizer([torch.nn.Parameter(torch.zeros(1))])
    assert type(optimizer).__name__ == "AdamW8bit"
    group = optimizer.param_groups[0]
    assert float(group["lr"]) == pytest.approx(1e-3)
    assert (tuple(group["betas"]), group["weight_decay"]) == ((0.9, 0.95), 0.05)


def test_model_files_are_those_of_the_table():
    made = runpy.run_path(str(ROOT / "scripts/model_configs.py"))["files"]()
    assert {name: (ROOT / "configs" / name).read_text() for name in made} == made
    assert made.keys() == {path.name for path in (ROOT / "configs").glob("*_2of*.yaml")}


@pytest.mark.parametrize("name", ["quickstart.yaml", "overlays/linear_anneal"])
def test_shipped_names_are_found_from_anywhere(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    found = find_config(name)
    assert found.read_text() == (ROOT / "configs" / name).with_suffix(".yaml").read_text()
    assert found.is_relative_to(shipped_configs())


# What a configuration extends.


def write(folder, files):
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text(content)


# Files that are written, the one that is named, and what it amounts to: the stems of all that count, first to last.
CHAINS = {
    "shipped": ({}, "qwen0.5b_2of4", ["paper", "qwen0.5b_2of4"]),
    "of two links": ({}, "qwen0.5b_2of8", ["paper", "qwen0.5b_2of4", "qwen0.5b_2of8"]),
    "a shipped one": ({"a.yaml": "extends: quickstart\n"}, "a", ["quickstart", "a"]),
    "in quotes, remarked": ({"a.yaml": "extends: 'quickstart' # it\n"}, "a", ["quickstart", "a"]),
    "after other keys": ({"a.yaml": "trainer: {}\nextends: quickstart"}, "a", ["quickstart", "a"]),
    "a mark, another spelling": ({"a.yaml": "\ufeff'extends' :\n  quickstart\n"}, "a", ["quickstart", "a"]),
    "beside the file": (
        {"there/a.yaml": "extends: b.yaml\n", "there/b.yaml": "{}", "b.yaml": "extends: quickstart\n"},
        "there/a.yaml",
        ["b", "a"],
    ),
    "in ./configs": ({"there/a.yaml": "extends: b\n", "configs/b.yaml": "{}"}, "there/a.yaml", ["b", "a"]),
    "an inner key of that name": ({"a.yaml": "model:\n  extends: quickstart\n"}, "a", ["a"]),
}


@pytest.mark.parametrize(("files", "name", "stems"), CHAINS.values(), ids=CHAINS)
def test_what_a_configuration_extends(tmp_path, monkeypatch, files, name, stems):
    monkeypatch.chdir(tmp_path)
    write(tmp_path, files)
    chain = with_extended(find_config(name))
    assert [path.stem for path in chain] == stems


# What is wrong in a.yaml or what it extends, and what is told.
BAD_CHAINS = {
    "nothing of that name": (
        {"a.yaml": "extends: qiuckstart\n"},
        "'a.yaml' extends 'qiuckstart': .*did you mean quickstart",
    ),
    "a circle": (
        {"a.yaml": "extends: b\n", "b.yaml": "extends: c\n", "c.yaml": "extends: a\n"},
        "'c.yaml' extends 'a', which extends it in turn; name",
    ),
    "a list": (
        {"a.yaml": "extends: [b, c]\n"},
        r"'a.yaml' extends \['b', 'c'\]; give one configuration's name",
    ),
}


@pytest.mark.parametrize(("files", "told"), BAD_CHAINS.values(), ids=BAD_CHAINS)
def test_what_no_configuration_can_extend(tmp_path, monkeypatch, files, told):
    monkeypatch.chdir(tmp_path)
    write(tmp_path, files)
    with pytest.raises(UserError, match=told):
        with_extended(find_config("a"))


def test_a_file_wins_over_what_it_extends(lab):
    files = {
        "own/base.yaml": "extends: quickstart\ntrainer: { max_steps: 7 }\n",
        "own/a.yaml": "model: { init_args: { lam: { class_path: Exponential }, pattern: 1:4 } }\n"
        "extends: base\ndata: { seq_len: 16 }\n",
        "b.yaml": "data: { batch_size: 3 }\n",
        "alone.yaml": '\ufeff# no more than\n"extends" :\n  quickstart\n',
        "flow.yaml": "{extends: alone, trainer: {max_steps: 3}}",
    }
    write(lab.folder, files)
    cli = instantiate("-c", "own/a.yaml", "-c", "b", "--model.lm", lab.model)
    assert (cli.trainer.max_steps, cli.datamodule.seq_len, cli.datamodule.batch_size) == (7, 16, 3)
    assert cli.model.pattern == NMPattern("1:4")
    assert cli.model.lam == Exponential(0.005, 0.002, 0.75), "a class's options stay, as with two --config"
    assert "extends" not in cli.parser.dump(cli.config)
    assert Path(cli.trainer.default_root_dir) == Path("runs/a+b")
    assert instantiate("-c", "alone", "--model.lm", lab.model).trainer.max_steps == 45
    assert instantiate("-c", "flow", "--model.lm", lab.model).trainer.max_steps == 3


def test_the_page_s_example_of_a_file_of_one_s_own(lab):
    example = (ROOT / "docs/configurations.md").read_text().split("```yaml\n# mine.yaml\n")[1].split("```")[0]
    write(lab.folder, {"mine.yaml": example})
    cli = instantiate("-c", "mine.yaml", "--model.lm", lab.model)
    assert [corpus.source for corpus in cli.datamodule.corpora] == ["my_texts/*.txt"], "a list is replaced"
    assert cli.datamodule.windows_per_step == 256
    assert Path(cli.trainer.default_root_dir) == Path("runs/mine")


@pytest.mark.parametrize("quote", ["", '"'])
def test_a_pattern_means_the_same_with_and_without_quotes(lab, quote):
    pattern, own = "16:32", lab.folder / "own.yaml"
    own.write_text(f"model:\n  init_args:\n    pattern: {quote}{pattern}{quote}\n")
    start = ["-c", "quickstart.yaml", "--model.lm", lab.model]
    assert instantiate(*start, "--model.pattern", pattern).model.pattern == NMPattern(pattern)
    written = instantiate(*start, "-c", own)
    assert written.model.pattern == NMPattern(pattern)
    saved = lab.folder / "saved.yaml"
    saved.write_text(written.parser.dump(written.config))
    assert yaml.safe_load(saved.read_text())["model"]["init_args"]["pattern"] == pattern
    assert instantiate("-c", saved).model.pattern == NMPattern(pattern)


LEARNERS = [[], ["-c", "overlays/maskllm"], ["-c", "overlays/proxsparse", "--model.strength", "1"]]
RECIPES = [["-c", f"recipes/{name}"] for name in ("paper", "paper_plus", "million_tokens", "gpu")]


@pytest.mark.parametrize("more", [*LEARNERS, *(pytest.param(x, marks=pytest.mark.slow) for x in RECIPES)])
def test_mixed_precision_goes_with_fused_optimizers_and_clipping(lab, more):
    start = ["-c", "quickstart.yaml", *more, *lab.options(max_steps=2)]
    words = [*start, "--trainer.precision", "bf16-mixed"]
    assert run("plan", *words) == run("fit", *words) == 0


@pytest.mark.parametrize("command", ["fit", "plan"])
@pytest.mark.parametrize("able", [True, False])
def test_what_is_slow_or_not_written_is_told(bench, half_width, caplog, command, able):
    half_width(able)
    config = ["--config", "quickstart.yaml", *bench.options()] if able else bench.lean()
    beginning = ["--ckpt_path", "nowhere"] if command == "fit" else []  # refused after these checks
    caplog.set_level("INFO", "lightning.pytorch.utilities.rank_zero")
    run(command, *config, "--model.dtype", "bfloat16", *beginning)
    assert ("slow at bfloat16: --model.dtype auto learns much faster" in caplog.text) == (not able)
    assert ("writes no mask and no export; add HardenMasks and SparseExport" in caplog.text) == (not able)


def test_a_change_of_class_says_once_what_it_drops(lab, caplog):
    with caplog.at_level("INFO", "lightning.pytorch.utilities.rank_zero"):
        build(lab.quick("-c", "overlays/proxsparse", "--model.strength", "1"), "fit")
    (line,) = [x.getMessage() for x in caplog.records if "discarding init_args" in x.getMessage()]
    assert "ProxSparseModule" in line
    assert "sampler" in line
    assert "lr_end" not in line, "both classes have it"


# Options as they are typed.


def test_the_printed_configuration_is_the_one_that_runs(lab, capsys):
    asked = lab.quick("--model.sampler", "StraightThrough", max_steps=1)
    assert run("fit", *asked, "--print_config") == 0
    printed = capsys.readouterr().out
    assert list(lab.folder.iterdir()) == []
    (lab.folder / "printed.yaml").write_text(printed)
    assert run("fit", "--config", "printed.yaml", "--print_config") == 0
    assert capsys.readouterr().out == printed
    assert run("fit", *asked) == 0
    (kept,) = lab.folder.rglob("config.yaml")
    printed, ran = yaml.safe_load(printed), yaml.safe_load(kept.read_text())
    assert all(printed[part] == ran[part] for part in ("seed_everything", "model", "data", "trainer"))
    assert printed["model"]["init_args"]["sampler"]["class_path"].endswith(".StraightThrough")


def test_callbacks_are_added_to_those_that_are_there(lab):
    page = (ROOT / "docs/monitoring.md").read_text()
    (snippet,) = re.findall(r"```yaml\n(trainer:\n  callbacks\+:\n.*?)```", page, re.DOTALL)
    (lab.folder / "more.yaml").write_text(snippet)
    before = build(lab.quick()).trainer.callbacks
    after = build(lab.quick("--config", "more.yaml")).trainer.callbacks
    (toggle,) = {type(callback).__name__ for callback in after} - {
        type(callback).__name__ for callback in before
    }
    assert toggle == "StraightThroughToggle"
    assert len(after) == len(before) + 1
    (lab.folder / "one.yaml").write_text("trainer: {max_steps: 1, callbacks: {class_path: HardenMasks}}")
    alone = build(["-c", "one.yaml", "--model.lm", str(lab.model)]).trainer.callbacks
    assert HardenMasks in {type(callback) for callback in alone}


def test_a_sampler_alone_leaves_the_schedules_as_they_are(lab):
    module = build(lab.quick("--model.sampler", "Categorical")).model
    assert module.sampler == Categorical()
    assert (module.lam, module.tau) == (Linear(0.005, 0.002, 0.75), Linear(0.2, 0.05, 0.75))
