"""Training checkpoints that are damaged, dangerous or of something else, given to every command that reads one."""

import io
import pickle
import zipfile

import pytest
import torch

from helpers.refusals import assert_refused, cut, flipped, make_bench, rows, spoiled, text

bench = pytest.fixture(make_bench)


# The bench's checkpoint was learned with other settings than the lean configuration's.
MEANT = "--allow_changed_settings"


def fit(bench, checkpoint):
    return ["fit", *bench.lean("--ckpt_path", checkpoint, MEANT)]


def validate(bench, checkpoint):
    return ["validate", *bench.lean("--ckpt_path", checkpoint)]


def export(bench, checkpoint):
    return ["export", *bench.lean("--ckpt_path", checkpoint, "--out", "out", MEANT)]


def inside(record, share):
    """One bit flipped within a record of the archive, where its bytes really lie."""

    def change(data):
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            info = next(i for i in archive.infolist() if i.filename.endswith(record))
            content = archive.read(info)
        start = data.index(content, info.header_offset)
        return flipped((start + share * len(content)) / len(data))(data)

    return change


class Hacker:
    def __reduce__(self):
        return (open, ("hacked", "w"))


def saved(content):
    def make(bench):
        path = bench.folder / "bad.ckpt"
        torch.save(content(bench), path)
        return path

    return make


def good(bench):
    return torch.load(bench.checkpoint, weights_only=True)


def of_run(**options):
    return lambda bench: bench.trained(bench.folder / "other.ckpt", **options)


def not_a_number(bench):
    content = good(bench)
    next(iter(content["state_dict"].values()))[0, 0] = float("nan")
    return content


def folder(bench):
    (bench.folder / "last.ckpt").mkdir()
    return "last.ckpt"


DANGEROUS = {
    "code in a pickle": (text("bad.ckpt", pickle.dumps({"state_dict": Hacker()})), "can't be read"),
    "code in an archive": (saved(lambda bench: good(bench) | {"extra": Hacker()}), "can't be read"),
}
TABLE = {
    "missing": (lambda bench: "nowhere.ckpt", validate, "no checkpoint at 'nowhere.ckpt'"),
    "a folder": (folder, fit, "'last.ckpt' can't be read: it is damaged or of another program"),
    **{
        f"{name}, {command.__name__}": (make, command, says)
        for name, (make, says) in DANGEROUS.items()
        for command in (fit, validate, export)
    },
    "cut at its end": (spoiled("checkpoint", cut(0.999)), export, "can't be read"),
    "flipped in the logits": (spoiled("checkpoint", inside("data/0", 0.5)), fit, "damaged"),
    "flipped in the pickle": (
        spoiled("checkpoint", inside("data.pkl", 0.5)),
        export,
        "damaged",
    ),
    "of another program": (
        saved(lambda bench: {"state_dict": {"w": torch.ones(2)}, "epoch": 1}),
        fit,
        "not written by",
    ),
    "a state of numbers": (
        saved(lambda bench: good(bench) | {"state_dict": {"a": 1}}),
        export,
        "not written by",
    ),
    "of another pattern": (of_run(pattern="1:4"), export, "holds a 1:4 run, model.pattern is 2:4"),
    "of other layers": (of_run(ignore=["k_proj"]), validate, "another model or layer choice"),
    "NaN in the logits": (saved(not_a_number), export, "not finite"),
}


@rows(TABLE)
def test_refused(bench, capsys, make, command, says):
    made = make(bench)
    assert_refused(bench, capsys, command(bench, made), says, made)
