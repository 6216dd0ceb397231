"""Directories that can't be packed, given to `pack`."""

import json

import pytest

from refusals import assert_refused, flipped, make_bench
from roi_lightning.export import write_export
from roi_lightning.export.sidecar import read_sidecar, write_sidecar
from roi_lightning.models.source import resolve_model
from tiny_models import random_masks, tiny_gguf

bench = pytest.fixture(make_bench)


def changed(file, change):
    """A copy of the bench's export with the bytes of one file changed."""

    def make(bench):
        export = bench.copy(bench.export)
        (export / file).write_bytes(change((export / file).read_bytes()))
        return export

    return make


def without(file):
    def make(bench):
        export = bench.copy(bench.export)
        (export / file).unlink()
        return export

    return make


def with_stranger(bench):
    export = bench.copy(bench.export)
    (export / "notes.txt").write_text("mine")
    return export


def other_pattern(bench):
    source = resolve_model(str(bench.model))
    return write_export(source, random_masks(source, "1:4"), bench.folder / "sparse")


def reconfigured(bench):
    """An export whose sidecar fits and whose configuration is of another type of model."""
    export = bench.copy(bench.export)
    config = json.loads((export / "config.json").read_text())
    (export / "config.json").write_text(json.dumps(config | {"model_type": "martian"}))
    content = read_sidecar(export)
    write_sidecar(export, {key: x for key, x in content.items() if key not in ("files", "checksum")})
    return export


TABLE = {
    "nothing": (lambda bench: "nowhere", "'nowhere' is no directory"),
    "a hub id": (lambda bench: "owner/model", "is no directory"),
    "a mask file": (lambda bench: bench.mask, "is no directory"),
    "a GGUF file": (lambda bench: tiny_gguf(bench.folder / "x.gguf"), "is no directory"),
    "a model that nobody pruned": (
        lambda bench: bench.model,
        "can't be packed: its roi_sparsity.json can't be read",
    ),
    "what is packed": (lambda bench: bench.packed, "is packed already.*from_packed"),
    "another pattern": (other_pattern, "has the pattern 1:4, and only 2:4 can be packed"),
    "no sidecar": (without("roi_sparsity.json"), "can't be packed: its roi_sparsity.json"),
    "a flipped sidecar": (
        changed("roi_sparsity.json", flipped(0.5)),
        "can't be packed: its roi_sparsity.json",
    ),
    "no mask file": (without("roi_mask.safetensors"), "does not verify .*roi_mask.safetensors"),
    "a flipped mask file": (
        changed("roi_mask.safetensors", flipped(0.9)),
        "does not verify .*changed since .*mask",
    ),
    "no weights": (without("model.safetensors"), "does not verify .*missing: model.safetensors"),
    "flipped weights": (changed("model.safetensors", flipped(0.9)), "does not verify .*changed since"),
    "another file": (with_stranger, "does not verify .*not written by roi_lightning: notes.txt"),
    "an unknown architecture": (reconfigured, "can't be read.*martian"),
}


@pytest.mark.parametrize(("make", "says"), TABLE.values(), ids=TABLE)
def test_refused(bench, capsys, make, says):
    made = make(bench)
    assert_refused(bench, capsys, ["pack", made, "--out", "out"], says, made)
