"""What a stranger is shown: help in groups, near names, one spelling of a thing, completion, versions."""

import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml

from cli_helpers import make_lab, run
from roi_lightning.cli.completion import all_commands
from roi_lightning.cli.lightning import build
from roi_lightning.cli.plan import PlanCLI
from roi_lightning.cli.run_help import SHORT, help_parser
from roi_lightning.learning.roi import RoILightningModule
from roi_lightning.learning.trainer import RoITrainer

lab = pytest.fixture(make_lab)
COMMANDS = ("fit", "validate", "export", "plan")
# What is typed in full with a value, for every short name.
VALUES = {
    "--lm": "smollm2-135m",
    "--pattern": "1:4",
    "--patterns": '{"k_proj": "4:8"}',
    "--sampler": "StraightThrough",
    "--prior": "none",
    "--corpora": "some.txt",
    "--seq_len": "77",
    "--steps": "3",
    "--seed": "5",
}


def shown(capsys, *words):
    assert run(*words) == 0
    return capsys.readouterr().out


def parsed(*words):
    return build([str(word) for word in words], "plan", PlanCLI).config.as_dict()


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_groups_defaults_and_about_thirty_options(command, capsys):
    told = shown(capsys, command, "--help")
    text, options = " ".join(told.split()), re.findall(r"^  -", told, re.MULTILINE)
    assert all(f" {group}: " in text for group in ("run", "model", "method", "text", "trainer"))
    assert 30 <= len(options) <= 45
    assert f"usage: roi-lightning {command} " in text
    assert "--pattern PATTERN N:M, N kept of every M consecutive inputs" in text
    assert "(default: 2:4; short for --model.pattern)" in text


def test_all_options_are_those_that_parse(lab):
    """The parser of `fit` itself lists what it takes of the trainer, and classes what of the model and the text."""
    parser = build([str(word) for word in lab.quick()], "plan", PlanCLI).parser
    takes = {name for action in parser._actions for name in action.option_strings if name.count(".") == 1}
    actions = help_parser("fit", everything=True)._actions
    told = {SHORT.get(name, name) for action in actions for name in action.option_strings}
    known = {name for name in takes if name.startswith("--trainer.") and not name.endswith((".help", "+"))}
    assert {name for name in told if name.startswith("--trainer.")} == known
    linked = {"tokenizer", "tokenizer_revision", "trust_remote_code", "seed"}
    text = {name.removeprefix("--data.") for name in told if name.startswith("--data.")}
    assert text == parsed(*lab.quick())["data"]["init_args"].keys() - linked
    options = {name.removeprefix("--model.") for name in told if name.startswith("--model.")}
    init_args = parsed(*lab.quick())["model"]["init_args"]
    of_others = {"strength", "average", "renew_every", "base", "norms", "biases"}
    assert options - of_others == init_args.keys() - {"seed"}


def test_the_defaults_in_the_help_are_the_learner_s(lab, capsys):
    text = " ".join(shown(capsys, "fit", "--help_all").split())
    learner = RoILightningModule(str(lab.model))
    for name in ("init_std", "prior_strength", "prior_windows", "kept_norm", "lr_end", "distillation"):
        (default,) = re.findall(rf"--model\.{name} .*?\(default: ([^)]+)\)", text)[:1]
        assert float(default) == getattr(learner, name)
    assert "--model.strength X" in text


def test_short_names_are_the_full_ones(lab):
    assert VALUES.keys() == SHORT.keys()
    words = [[name, f"{SHORT[name]}"] for name in VALUES]
    short, full = (
        parsed(
            *(word for names, value in zip(words, VALUES.values(), strict=True) for word in (names[i], value))
        )
        for i in (0, 1)
    )
    assert short == full
    model, data = short["model"]["init_args"], short["data"]["init_args"]
    assert (model["lm"], model["pattern"], model["prior"]) == ("smollm2-135m", "1:4", "none")
    assert model["patterns"] == {"k_proj": "4:8"}
    assert model["sampler"]["class_path"].endswith(".StraightThrough")
    assert (data["corpora"], data["seq_len"]) == ("some.txt", 77)
    assert (short["trainer"]["max_steps"], short["seed_everything"]) == (3, 5)


def test_dashes_are_underscores(lab, capsys):
    words = lab.quick("--seq-len", "16", "--model.init-std=0.25", "--trainer.max-steps", "2")
    config = yaml.safe_load(shown(capsys, "fit", *words, "--print-config"))
    assert (config["data"]["init_args"]["seq_len"], config["model"]["init_args"]["init_std"]) == (16, 0.25)
    assert run("evaluate", "nowhere", "--seq-len", "1") == 1
    assert "--seq_len is 1; give at least" in capsys.readouterr().err


QUICK = ("--config", "quickstart.yaml")
MISTAKES = {
    "a command": (("fitt",), "no command 'fitt'; did you mean fit?"),
    "no configuration": (("fit",), "no model to learn on.*try: roi-lightning fit --config quickstart.yaml"),
    "a sampler": (
        ("fit", *QUICK, "--sampler", "Gumbel"),
        "sampler 'Gumbel' is no class; did you mean GumbelTopK.*StraightThrough, or a class path",
    ),
    "a schedule": (("fit", *QUICK, "--model.tau", "Expo"), "tau 'Expo' is no class; .*Exponential, Linear"),
    "a learner": (
        ("fit", *QUICK, "--model", "RoI"),
        "choose MaskProModule, ProxSparseModule, RecoveryModule, RoILightningModule",
    ),
    "an optimizer": (("fit", *QUICK, "--model.optimizer", "AdmW"), "did you mean AdamW"),
    "a callback": (("fit", *QUICK, "--trainer.callbacks+", "HardenMask"), "did you mean HardenMasks"),
    "a value of the text": (
        ("fit", *QUICK, "--seq_len", "many"),
        "--data.seq_len: expected int. Got value: many",
    ),
    "a value of the trainer": (("fit", *QUICK, "--steps", "many"), "--trainer.max_steps: expected int"),
    "an option of the learner": (("fit", *QUICK, "--model.init_stdd", "3"), "did you mean init_std?"),
    "an option of another learner": (
        ("fit", *QUICK, "--model", "RecoveryModule", "--sampler", "StraightThrough"),
        "'sampler' is not accepted; it is an option of another class than this run's, leave it out",
    ),
    "an option of a schedule": (("fit", *QUICK, "--model.tau.star", "3"), "did you mean start?"),
    "an option of the text": (("fit", *QUICK, "--data.seqlen", "3"), "did you mean seq_len"),
    "an option of prune": (("prune", "m", "--method", "wanda", "--outt", "x"), "--out"),
    "no checkpoint": (("validate", *QUICK), "^error: validate needs --ckpt_path"),
    "no directory": (
        ("export", *QUICK, "--ckpt_path", "x"),
        "required: out.*try: roi-lightning export ... --out DIR",
    ),
}


@pytest.mark.parametrize(("words", "told"), MISTAKES.values(), ids=MISTAKES.keys())
def test_a_mistake_names_what_was_meant(words, told, capsys):
    assert run(*words) in (1, 2)
    captured = capsys.readouterr()
    assert re.search(told, " ".join(captured.err.splitlines())), captured.err
    assert not captured.out


FILES = {
    "my_own.py": "from roi_lightning.samplers import GumbelTopK\nclass Logistic(GumbelTopK):\n    pass\n",
    "my_import.py": "import nothere\n",
    "my_broken.py": "def (:\n",
}


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("my_own.Logistik", "no attribute 'Logistik'; did you mean Logistic?"),
        ("my_one.Logistic", "No module named 'my_one'; class paths are looked up in this folder"),
        ("my_import.Logistic", "'my_import.Logistic' can't be used: No module named 'nothere'$"),
        ("my_broken.Logistic", r"can't be imported: invalid syntax \(my_broken.py, line 1\)"),
    ],
)
def test_a_class_path_that_leads_nowhere_says_why(path, told, lab, monkeypatch, capsys):
    for name, text in FILES.items():
        (lab.folder / name).write_text(text)
    monkeypatch.syspath_prepend(str(lab.folder))
    assert run("plan", *lab.quick("--sampler", path)) == 2
    error, remedy = capsys.readouterr().err.splitlines()
    assert re.search(told, error), error
    assert remedy == "try: roi-lightning plan --help"
    for name in FILES:
        sys.modules.pop(name.removesuffix(".py"), None)


@pytest.mark.parametrize("command", ["plan", "fit"])
def test_text_that_is_not_there_is_missed_first(command, lab, capsys):
    assert run(command, *lab.quick("--corpora", "no_such_texts/*.txt")) == 1
    captured = capsys.readouterr()
    assert "corpus 'no_such_texts/*.txt': no file matches" in captured.err
    assert "calibration" not in captured.err + captured.out


def test_a_run_s_folder_is_not_its_export(tmp_path, capsys):
    (tmp_path / "run/export").mkdir(parents=True)
    (tmp_path / "run/export/roi_sparsity.json").write_text("{}")
    assert run("verify", tmp_path / "run") == 1
    assert f"holds one; give '{tmp_path / 'run/export'}'" in capsys.readouterr().err


def test_versions(capsys):
    text = shown(capsys, "--version").splitlines()
    assert [f"{name} {version(name)}" for name in ("roi-lightning", "torch", "transformers")] == text[:3]
    assert f"Python {sys.version.split()[0]}" in text


def test_class_paths_may_name_files_of_the_working_folder(tmp_path, monkeypatch, capsys):
    """As the installed command starts: with its own folder on the path, not the working one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path / "bin"), *(p for p in sys.path if p)])
    monkeypatch.setattr(sys, "argv", ["roi-lightning", "--version"])
    from roi_lightning.__main__ import main

    assert main() == 0
    assert sys.path[0] == str(tmp_path)
    assert main() == 0
    assert sys.path.count(str(tmp_path)) == 1


@pytest.mark.parametrize("hint", [int | float | None, float | int | None])
def test_what_may_be_a_fraction_is_an_x_in_whatever_order_typing_gives_it(monkeypatch, hint):
    monkeypatch.setitem(RoITrainer.__init__.__annotations__, "val_check_interval", hint)
    assert "--trainer.val_check_interval X" in help_parser("fit", everything=True).format_help()


def test_completion_in_bash(capsys, tmp_path):
    pytest.importorskip("shtab")
    script = tmp_path / "completion.bash"
    script.write_text(shown(capsys, "completion", "bash"))

    def complete(*words):
        program = 'source "$1"; shift; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _shtab_roi_lightning; '
        program += 'echo "${COMPREPLY[@]}"'
        done = subprocess.run(
            ["bash", "-c", program, "bash", script, *words], check=True, capture_output=True, text=True
        )
        return done.stdout.split()

    assert complete("roi-lightning", "pru") == ["prune"]
    assert complete("roi-lightning", "fit", "--model.init_") == ["--model.init_std"]
    assert complete("roi-lightning", "prune", "--off") == ["--offload_dir"]
    assert complete("roi-lightning", "prune", "--dtype", "bf") == ["bfloat16"]


def test_completion_without_shtab(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert run("completion", "bash") == 1
    assert "pip install 'roi-lightning[completion]'" in capsys.readouterr().err


def test_the_page_of_commands_is_theirs(monkeypatch):
    docs = Path(__file__).parents[2] / "docs"
    monkeypatch.syspath_prepend(str(docs))
    import write_cli

    assert (docs / "cli.md").read_text() == write_cli.page()
    assert all_commands().prog == "roi-lightning"
