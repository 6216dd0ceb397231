"""Directories that can't be packed, given to `pack`."""

import pytest

from helpers.refusals import assert_refused, flipped, make_bench
from helpers.tiny_models import random_masks, tiny_mamba
from roi_lightning.export import write_export
from roi_lightning.models.source import resolve_model

bench = pytest.fixture(make_bench)


def changed(file, change):
    """A copy of the bench's export with the bytes of one file changed."""

    def make(bench):
        export = bench.copy(bench.export)
        (export / file).write_bytes(change((export / file).read_bytes()))
        return export

    return make


def with_stranger(bench):
    export = bench.copy(bench.export)
    (export / "notes.txt").write_text("mine")
    return export


def other_pattern(bench):
    source = resolve_model(str(bench.model))
    return write_export(source, random_masks(source, "1:4"), bench.folder / "sparse")


def read_by_the_model(bench):
    source = resolve_model(str(tiny_mamba(bench.folder / "mamba")))
    return write_export(source, random_masks(source, "2:4"), bench.folder / "sparse")


TABLE = {
    "a weight that the model reads itself": (
        read_by_the_model,
        r"'backbone.layers.0.mixer.dt_proj.weight' can't run packed.*leave it out",
    ),
    "nothing": (lambda bench: "nowhere", "'nowhere' is no directory"),
    "a model that nobody pruned": (
        lambda bench: bench.model,
        "can't be packed: its roi_sparsity.json can't be read",
    ),
    "what is packed": (lambda bench: bench.packed, "is packed already.*from_packed"),
    "another pattern": (other_pattern, "has the pattern 1:4, and only 2:4 can be packed"),
    "a flipped mask file": (
        changed("roi_mask.safetensors", flipped(0.9)),
        "does not verify .*changed since .*mask",
    ),
    "flipped weights": (changed("model.safetensors", flipped(0.9)), "does not verify .*changed since"),
    "another file": (with_stranger, "does not verify .*not written by roi_lightning, remove it: notes.txt"),
}


@pytest.mark.parametrize(("make", "says"), TABLE.values(), ids=TABLE)
def test_refused(bench, capsys, make, says):
    made = make(bench)
    assert_refused(bench, capsys, ["pack", made, "--out", "out"], says, made)
