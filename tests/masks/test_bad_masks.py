"""Damaged, foreign and crafted mask files, given to every command that reads one."""

import json

import pytest
import torch

from helpers.refusals import (
    assert_process_refused,
    assert_refused,
    cut,
    flipped,
    make_bench,
    resealed,
    rows,
    spoiled,
    text,
)
from helpers.tiny_models import random_masks, tiny_gpt2, tiny_llama, tiny_qwen2
from roi_lightning.models.source import resolve_model

bench = pytest.fixture(make_bench)
Q = "model.layers.0.self_attn.q_proj.weight"


def apply(bench, mask):
    return ["apply", bench.model, mask, "--out", "out"]


def evaluate(bench, mask):
    return ["evaluate", mask, "--base", bench.model, "--text", bench.corpus, "--json", "out.json"]


def prior(bench, mask):
    return ["fit", *bench.lean("--model.prior", mask)]


def layer(**entries):
    """Metadata in which the first layer is described otherwise."""

    def change(header):
        layers = json.loads(header["layers"])
        layers[Q] |= entries
        return {"layers": json.dumps(layers)}

    return change


def metadata(**entries):
    return lambda header: entries


def strangers(builder, **sizes):
    """The masks of another model."""

    def make(bench):
        path = bench.folder / "strange.safetensors"
        random_masks(resolve_model(str(builder(bench.folder / "other", **sizes)))).save(path)
        return path

    return make


def without(*names):
    return lambda tensors: {name: x for name, x in tensors.items() if name not in names}


def all_kept(tensors):
    return tensors | {Q: torch.full_like(tensors[Q], 255)}


def no_hash(header):
    hashes = json.loads(header["sha256"])
    del hashes[Q]
    return {"sha256": json.dumps(hashes)}


def other_hash(header):
    return {"sha256": json.dumps(json.loads(header["sha256"]) | {Q: "0" * 64})}


def consistent_loss(header):
    """A layer forgotten everywhere in the metadata."""
    return {
        key: json.dumps({n: x for n, x in json.loads(header[key]).items() if n != Q})
        for key in ("layers", "sha256")
    }


TABLE = {
    "absent": (lambda bench: "nowhere", apply, "'nowhere': it can't be read: No such file"),
    "a length of 2^63": (text("m.safetensors", b"\0" * 7 + b"\x80{}"), apply, "can't be read"),
    "cut in the bits": (spoiled("mask", cut(0.9)), apply, "can't be read"),
    "flipped in the bits": (spoiled("mask", flipped(0.9)), apply, "damaged"),
    "a model's weights": (lambda bench: bench.model / "model.safetensors", apply, "did not write it"),
    "a packed directory": (lambda bench: bench.packed, apply, "has no roi_mask.safetensors.*packed from"),
    "of another model, evaluated": (strangers(tiny_llama), evaluate, "another model"),
    "of a model with other names": (
        strangers(tiny_gpt2),
        apply,
        "another model.* there is no tensor 'transformer",
    ),
    "of a wider model": (
        strangers(tiny_qwen2, intermediate_size=256),
        apply,
        r"another model.* is \[64, 128\], not \[64, 256\]",
    ),
    "N is M": (resealed(metadata(n="4")), apply, "pattern 4:4 is impossible"),
    "another format": (resealed(metadata(format="other")), apply, "format is 'other'"),
    "a version to come": (resealed(metadata(version="3")), apply, "version is '3'"),
    "layers: no JSON": (resealed(metadata(layers="{")), apply, "makes no sense"),
    "hashes: a list": (resealed(metadata(sha256="[]")), apply, "makes no sense .*not a mapping"),
    "no hash of a layer": (resealed(no_hash), apply, "have a hash"),
    "another hash": (resealed(other_hash), apply, "another model.*other values"),
    "a shape with other rows": (resealed(layer(shape=[32, 64])), apply, r"packed mask of \[32, 64\]"),
    "columns past the bits": (
        resealed(layer(shape=[64, 61])),
        apply,
        r"\[64, 61\] has bits past its last input",
    ),
    "a tensor fewer": (resealed(tensors=without(Q)), apply, "lists other layers"),
    "all kept": (resealed(tensors=all_kept), apply, "q_proj.* does not keep exactly 2:4"),
    "a layer fewer, as prior": (resealed(consistent_loss, without(Q)), prior, "no mask for .*q_proj"),
    "of updated weights": (resealed(metadata(updated=json.dumps({Q: "0"}))), apply, "method updated"),
}


@rows(TABLE)
def test_refused(bench, capsys, make, command, says):
    made = make(bench)
    assert_refused(bench, capsys, command(bench, made), says, made)


@pytest.mark.slow
def test_the_process_ends_the_same_way(bench):
    make, command, says = TABLE["flipped in the bits"]
    assert_process_refused(bench, command(bench, make(bench)), says)
