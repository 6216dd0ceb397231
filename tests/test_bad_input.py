"""What a user gets wrong ends in one clear line, a non-zero status and no file."""

import os
import re
import subprocess
import sys

import pytest
import torch

from cli_helpers import make_lab, run
from data_helpers import write_jsonl
from roi_lightning.sources import resolve_model
from tiny_models import random_masks, tiny_llama

lab = pytest.fixture(make_lab)


def write(path, text):
    path.write_text(text)
    return str(path)


def foreign(lab):
    folder = lab.folder / "taken"
    folder.mkdir()
    write(folder / "notes.txt", "mine")
    return str(folder)


def strange_mask(lab):
    path = lab.folder / "strange.safetensors"
    random_masks(resolve_model(str(tiny_llama(lab.folder / "other")))).save(path)
    return str(path)


def other_pattern(lab):
    path = lab.folder / "mask.safetensors"
    random_masks(resolve_model(str(lab.model)), "1:4").save(path)
    return str(path)


def foreign_checkpoint(lab):
    torch.save({"state_dict": {}, "global_step": 1}, lab.folder / "foreign.ckpt")
    return str(lab.folder / "foreign.ckpt")


def fit(*more):
    return lambda lab: ["fit", *lab.quick(*more)]


def fit_with(option, make):
    return lambda lab: ["fit", *lab.quick(option, make(lab))]


def export_of(make):
    return lambda lab: ["export", *lab.quick("--out", "out", "--ckpt_path", make(lab))]


# What is typed → what the line says.
TABLE = {
    "N above M": (fit("--model.pattern", "5:4"), "pattern 5:4 is impossible"),
    "N of zero": (fit("--model.pattern", "0:4"), "pattern 0:4 is impossible"),
    "no pattern": (fit("--model.pattern", "dense"), "pattern 'dense' is not of the form N:M"),
    "M does not divide": (fit("--model.pattern", "2:3"), "q_proj has 64 inputs, which 3 does not divide"),
    "ignore of nothing": (fit("--model.ignore", "[gate]"), "ignore: 'gate' matches none"),
    "unknown prior": (fit("--model.prior", "wandda"), "none of none, magnitude, activation"),
    "unknown sampler": (fit("--model.sampler", "Dice"), "Dice"),
    "cold temperature": (fit("--model.tau.end", "0"), "temperature must be a positive number"),
    "negative std": (fit("--model.init_std", "-1"), "model.init_std -1.0"),
    "precision": (fit("--trainer.precision", "bf16-true"), "would round the logits"),
    "no end": (fit("--trainer.max_steps", "-1"), "trainer.max_steps is -1"),
    "unknown option": (fit("--model.patern", "2:4"), "patern"),
    "not a number": (fit("--data.seq_len", "many"), "data.seq_len"),
    "empty corpus": (fit_with("--data.corpora", lambda lab: write(lab.folder / "e.jsonl", "")), "e.jsonl"),
    "empty text": (fit_with("--data.corpora", lambda lab: write(lab.folder / "e.txt", "")), "e.txt"),
    # Valid YAML, too: not to be taken for the corpus's name.
    "short text": (fit_with("--data.corpora", lambda lab: write(lab.folder / "s.txt", "a cat sat")), "s.txt"),
    "short corpus": (
        fit_with("--data.corpora", lambda lab: write_jsonl(lab.folder / "s.jsonl", ["so short"] * 2)),
        "only 16 tokens, one window needs 32",
    ),
    "missing corpus": (fit("--data.corpora", "nowhere.jsonl"), "'nowhere.jsonl': no file matches"),
    "missing configuration": (
        lambda lab: ["fit", "-c", "qwen0.5b.yaml"],
        "did you mean .*qwen0.5b_2of4.yaml",
    ),
    "no YAML": (lambda lab: ["fit", "-c", write(lab.folder / "bad.yaml", "a: [1\nb: ]]")], "bad.yaml"),
    "typo in a file": (
        fit_with("-c", lambda lab: write(lab.folder / "typo.yaml", "trainer: {max_step: 3}")),
        "max_step",
    ),
    "missing model": (fit("--model.lm", "./nowhere"), "model './nowhere' is no directory"),
    "no model": (lambda lab: ["fit", *lab.quick("--model.lm", foreign(lab))], "no config.json"),
    "missing plugin model": (fit("--model.lm", "gguf:nowhere.gguf"), "no GGUF file at 'nowhere.gguf'"),
    "prior of another model": (fit_with("--model.prior", strange_mask), "another model"),
    "prior of another pattern": (fit_with("--model.prior", other_pattern), "1:4.*2:4"),
    "taken export": (
        lambda lab: [
            *("fit", *lab.quick("--trainer.callbacks", "SparseExport")),
            *("--trainer.callbacks.out", foreign(lab)),
        ],
        "was not written by roi_lightning",
    ),
    "precision, before any text is read": (
        fit("--trainer.precision", "bf16-true", "--data.corpora", "nowhere.jsonl"),
        "would round the logits",
    ),
    "fit from a word": (fit("--ckpt_path", "last"), "no checkpoint at 'last'"),
    "fit from nothing": (fit("--ckpt_path", "nowhere.ckpt"), "no checkpoint at 'nowhere.ckpt'"),
    "fit from noise": (
        fit_with("--ckpt_path", lambda lab: write(lab.folder / "noise.ckpt", "noise")),
        "noise.ckpt' can't be read",
    ),
    "fit from a stranger": (fit_with("--ckpt_path", foreign_checkpoint), "not written by roi_lightning"),
    "export of nothing": (export_of(lambda lab: "nowhere.ckpt"), "no checkpoint at 'nowhere.ckpt'"),
    "export of noise": (export_of(lambda lab: write(lab.folder / "n.ckpt", "noise")), "can't be read"),
    "export of a stranger": (export_of(foreign_checkpoint), "not written by roi_lightning"),
    "export of no checkpoint": (lambda lab: ["export", *lab.quick("--out", "out")], "needs --ckpt_path"),
    "apply to another model": (
        lambda lab: ["apply", lab.model, strange_mask(lab), "--out", "out"],
        "mask file of another model",
    ),
    "apply nothing": (lambda lab: ["apply", lab.model, "nowhere", "--out", "out"], "nowhere"),
    "apply into a taken folder": (
        lambda lab: ["apply", lab.model, other_pattern(lab), "--out", foreign(lab)],
        "was not written by roi_lightning",
    ),
    "verify nothing": (lambda lab: ["verify", "nowhere"], "nowhere"),
    "plan of nothing": (lambda lab: ["plan", *lab.quick("--model.lm", "./nowhere")], "is no directory"),
    "unknown command": (lambda lab: ["train"], "no command 'train'; the commands are fit"),
}
if not torch.cuda.is_available():
    TABLE["no such device"] = (fit("--trainer.accelerator", "cuda"), "CUDAAccelerator.* can not run")


def tree(folder):
    ours = (path for path in folder.rglob("*") if "events.out" not in path.name)
    return {str(path.relative_to(folder)) for path in ours}


@pytest.mark.parametrize(("typed", "says"), TABLE.values(), ids=TABLE)
def test_one_clear_line(lab, capsys, typed, says):
    arguments = typed(lab)
    before = tree(lab.folder)
    assert run(*arguments) in (1, 2)
    told = capsys.readouterr()
    lines = told.err.splitlines()
    assert "Traceback" not in told.err
    (at,) = (i for i, line in enumerate(lines) if "error: " in line)
    assert re.search(says, lines[at]), told.err
    assert len(lines[at]) < 400
    assert len(lines) - at <= 3, told.err
    left = {path for path in tree(lab.folder) - before if path.endswith((".safetensors", ".ckpt", ".json"))}
    assert not left
    assert not (lab.folder / "out").exists()


def test_the_process_ends_the_same_way(lab):
    typed, says = TABLE["N above M"]
    command = [sys.executable, "-m", "roi_lightning", *map(str, typed(lab))]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"NO_COLOR": "1"})
    assert done.returncode in (1, 2)
    assert "Traceback" not in done.stderr
    assert "Warning" not in done.stderr
    assert re.search(says, done.stderr)
