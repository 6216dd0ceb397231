"""What a user gets wrong on the command line ends in one clear line, a non-zero status and no file."""

import pytest
import torch

from helpers.refusals import assert_refused, make_bench, rows
from helpers.text_files import write_jsonl
from helpers.tiny_models import random_masks, tiny_llama
from roi_lightning.models.source import resolve_model

bench = pytest.fixture(make_bench)


def strange_mask(bench):
    path = bench.folder / "strange.safetensors"
    random_masks(resolve_model(str(tiny_llama(bench.folder / "other")))).save(path)
    return path


def other_pattern(bench):
    path = bench.folder / "mask.safetensors"
    random_masks(resolve_model(str(bench.model)), "1:4").save(path)
    return path


def short(bench):
    return write_jsonl(bench.folder / "s.jsonl", ["so short"] * 2)


def typed(*words):
    return lambda bench: words


def fit(bench, words):
    return ["fit", *bench.lean(*words)]


def fit_with(option):
    return lambda bench, value: ["fit", *bench.lean(option, value)]


def command(bench, words):
    return words


# Something made → what is typed → what the line says. More of each kind is in the tables of the other files.
TABLE = {
    "no pattern": (typed("--model.pattern", "dense"), fit, "pattern 'dense' is not of the form N:M"),
    "unknown prior": (typed("--model.prior", "wandda"), fit, "none of none, magnitude, activation"),
    "cold temperature": (typed("--model.tau.end", "0"), fit, "temperature must be a positive number"),
    # Valid YAML, too: not to be taken for the corpus's name.
    "short corpus": (short, fit_with("--data.corpora"), "only 16 tokens, one window needs 32"),
    "prior of another model": (strange_mask, fit_with("--model.prior"), "another model"),
    "prior of another pattern": (other_pattern, fit_with("--model.prior"), "1:4.*2:4"),
    "precision, before any text is read": (
        typed("--trainer.precision", "bf16-true", "--data.corpora", "nowhere.jsonl"),
        fit,
        "would round the logits",
    ),
    "fit from a word": (typed("--ckpt_path", "last"), fit, "no checkpoint at 'last'"),
    "plan of nothing": (
        typed("--model.lm", "./nowhere"),
        lambda bench, words: ["plan", *bench.lean(*words)],
        "model './nowhere' is no directory",
    ),
}
if not torch.cuda.is_available():
    TABLE["no such device"] = (
        typed("--trainer.accelerator", "cuda"),
        fit,
        "CUDAAccelerator.* can not run",
    )


@rows(TABLE)
def test_refused(bench, capsys, make, command, says):
    assert_refused(bench, capsys, command(bench, make(bench)), says)
