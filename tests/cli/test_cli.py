"""Whole runs from the command line, and the files they leave."""

import json
import re
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from docs.count_commands import ROOT
from helpers.lab import Lab, make_lab, plain_text, run
from helpers.slow_perplexity import by_a_loop
from roi_lightning.cli.commands import COMMANDS, CONFIGURED
from roi_lightning.cli.lightning import build
from roi_lightning.utils.entry_points import added

lab = pytest.fixture(make_lab)
# Lightning's remark on a second run in the same folder.
pytestmark = pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    """A finished run of `quickstart.yaml`."""
    folder = tmp_path_factory.mktemp("quick")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        made = Lab(folder, tmp_path_factory.getbasetemp() / "lab")
        assert run("fit", *made.quick()) == 0
        yield made


def held_out_perplexity(lab, model):
    """Of the quickstart's held-out windows, by transformers alone."""
    data = build([str(word) for word in lab.quick()]).datamodule
    data.setup("validate")
    ids = data.windows("val", data.val_tokens // data.seq_len)
    return by_a_loop(AutoModelForCausalLM.from_pretrained(model), ids)


def test_quickstart_leaves_its_summary(quick, capsys):
    folder = quick.folder / "runs" / "quickstart"
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["perplexity"].keys() == {"dense", "magnitude", "activation", "roi"}
    export = quick.folder / summary["export"]
    for name, model in (("dense", quick.model), ("roi", export)):
        assert summary["perplexity"][name] == pytest.approx(held_out_perplexity(quick, model), rel=1e-3), name
    lm = AutoModelForCausalLM.from_pretrained(export)
    zeros = {name: int((x == 0).sum()) for name, x in lm.named_parameters()}
    pruned = {name: x.numel() for name, x in lm.named_parameters() if "_proj.weight" in name}
    total = sum(x.numel() for x in lm.parameters())
    assert summary["zeros"]["prunable"] == sum(zeros[name] for name in pruned) / sum(pruned.values()) == 0.5
    assert summary["zeros"]["model"] == pytest.approx(sum(zeros.values()) / total)
    assert summary["seconds"] > 0
    assert (quick.folder / summary["export"]).resolve() == (folder / "export").resolve()
    assert run("verify", summary["export"], "--base", quick.model) == 0
    assert re.search(r"all \d+ checks hold", plain_text(capsys.readouterr().out))
    assert (folder / "mask.safetensors").is_file()
    assert list(folder.glob("events.out.tfevents.*"))


def test_validate_prints_what_the_summary_says(quick, capsys):
    folder = quick.folder / "runs" / "quickstart"
    before = (folder / "config.yaml").read_text()
    command = [*quick.quick(), "--ckpt_path", folder / "checkpoints" / "last.ckpt"]
    assert run("validate", *command, "--trainer.logger", "false") == 0
    printed = plain_text(capsys.readouterr().out)
    value = float(printed.split("val/perplexity")[1].split()[0])
    wanted = json.loads((folder / "summary.json").read_text())["perplexity"]["roi"]
    assert value == pytest.approx(wanted, rel=1e-3)
    assert (folder / "config.yaml").read_text() == before, "the run's own configuration"


def test_export_apply_and_verify_agree_with_the_run(quick, tmp_path):
    folder = quick.folder / "runs" / "quickstart"
    checkpoint, kept = folder / "checkpoints" / "last.ckpt", ["--config", folder / "config.yaml"]
    wanted = load_file(folder / "export/model.safetensors")
    commands = {
        "by the same options": ["export", *quick.quick(), "--ckpt_path", checkpoint],
        "by the kept configuration": ["export", *kept, "--ckpt_path", checkpoint],
        "from the mask": ["apply", quick.model, folder / "mask.safetensors"],
    }
    for name, command in commands.items():
        assert run(*command, "--out", tmp_path / name) == 0
        assert run("verify", tmp_path / name, "--base", quick.model) == 0
        found = load_file(tmp_path / name / "model.safetensors")
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[tensor], wanted[tensor]) for tensor in wanted), name


def test_the_overview_names_every_command(capsys):
    assert run("--help") == 0
    overview = capsys.readouterr().out
    assert all(f"  {command} " in overview for command in [*COMMANDS, *added("commands")])


IMPORTS = """
import sys
from roi_lightning.__main__ import main
from roi_lightning.cli.commands import COMMANDS, CONFIGURED
from roi_lightning.utils.entry_points import added

def ends(status, *words):
    try:
        assert main(words) == status
    except SystemExit as stop:
        assert (stop.code or 0) == status

def is_light(*words):
    ends(*words)
    heavy = {"torch", "transformers", "lightning"} & set(sys.modules)
    assert not heavy, (words, heavy)

for command in [*COMMANDS, *added("commands")]:
    is_light(0, command, "--help")
    is_light(2, command, "--wrong", "3")
for command in CONFIGURED:
    is_light(0, command, "--help_all")
    is_light(2, command, "--config", "quickstart.yaml", "--model.lr=0.1")

helped = {name for name in sys.modules if name.startswith("roi_lightning.contrib")}
ends(0, "fit", "--config", "quickstart.yaml", "--print_config")
print(sum(name.startswith("roi_lightning") for name in sys.modules.keys() - helped), file=sys.stderr)

from docs.write_help import STORED, made_with, text
stored = STORED.read_text()
assert made_with() not in stored or text() == stored, "run: python -m docs.write_help"
"""


def test_a_command_imports_what_it_needs():
    """Nothing heavy for help and unknown options, of which what is stored is what the parser says."""
    done = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    commands = len(COMMANDS) + len(added("commands"))
    assert done.stdout.count("usage:") == commands + len(CONFIGURED)
    assert done.stderr.count("error: unrecognized arguments: --wrong") == commands
    assert int(done.stderr.split()[-1]) <= 95, "files of ours; annexes are imported where they are used"


def test_a_run_cut_off_after_its_last_step_is_finished_by_resuming(lab):
    """Lightning trains no step then, and calls no end of training; mask, export and table must come all the same."""
    assert run("fit", *lab.quick(max_steps=2)) == 0
    folder = lab.folder / "runs" / "quickstart"
    made = (folder / "mask.safetensors").read_bytes()
    for name in ("mask.safetensors", "summary.json", "export/roi_sparsity.json"):
        (folder / name).unlink()
    shutil.rmtree(folder / "export")
    assert run("fit", *lab.quick(max_steps=2), "--ckpt_path", folder / "checkpoints" / "last.ckpt") == 0
    assert (folder / "mask.safetensors").read_bytes() == made
    assert json.loads((folder / "summary.json").read_text())["steps"] == 2
    assert run("verify", folder / "export", "--base", lab.model) == 0
