"""Mask files, mutated: read, applied, verified and compared."""

import copy
import json
import random
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.fuzz.watch import WrongError
from roi_lightning.__main__ import main
from roi_lightning.errors import UserError
from roi_lightning.export import write_export
from roi_lightning.masks.layer_mask import LayerMask
from roi_lightning.masks.mask_set import MASK_FILE, MaskSet
from roi_lightning.masks.pattern import NMPattern
from roi_lightning.models.base_tensors import open_base
from roi_lightning.models.fingerprint import base_model
from roi_lightning.models.source import ModelSource, resolve_model
from roi_lightning.utils.checksummed import read_checksummed, write_checksummed

# Commands take longer than reading; this fraction of the cases runs one of them.
_COMMANDS = 0.1
_ODD: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 3, 4, 8, 64, 2**31, 2**63, 10**40, 0.5, float("nan"), "", "2", "0"),
    *("-1", "x" * 5000, "\x00", "∞", "model.norm.weight", [], [1], [64, 64], [0, 0], {}, {"shape": [64, 64]}),
)
_PIECES = (b"", b'"', b"{", b"[", b"0", b"-", b"\\u", b"\xff", b"9" * 30)


class MaskCases:
    """Cases around one good mask file of a tiny model.

    Args:
        folder: To work in; its content is made here.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.model = folder, _tiny_model(folder / "model")
        source = resolve_model(str(self.model))
        self.masks = _some_masks(source)
        self.export = write_export(source, self.masks, folder / "export")
        self.good = (self.export / MASK_FILE).read_bytes()
        self.tensors, self.header = read_checksummed(self.export / MASK_FILE)
        self.file = folder / "mutated.safetensors"

    def __call__(self, rng: random.Random) -> tuple[str, Callable[[], None]]:
        """Draw a case."""
        if rng.random() < 0.5:
            kind, data = self._bytes(rng)
            self.file.write_bytes(data)
            sealed = False
        else:
            kind, sealed = self._sealed(rng), True
        if rng.random() < _COMMANDS:
            name = rng.choice(("apply", "compare", "verify"))
            return f"{kind}, {name}", partial(getattr(self, f"_{name}"), sealed)
        return kind, partial(self._load, sealed)

    def _bytes(self, rng: random.Random) -> tuple[str, bytes]:
        kind = rng.choice(("cut", "bits", "bytes", "insertion", "deletion", "header text", "header JSON"))
        data, end = bytearray(self.good), 8 + int.from_bytes(self.good[:8], "little")
        at = rng.randrange(len(data))
        if kind == "cut":
            del data[at:]
        elif kind == "bits":
            for _ in range(rng.choice((1, 1, 1, 2, 8, 100))):
                data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        elif kind == "bytes":
            span = rng.randbytes(rng.choice((1, 8, 64)))
            data[at : at + len(span)] = span
        elif kind == "insertion":
            data[at:at] = rng.randbytes(rng.choice((1, 8, 1000)))
        elif kind == "deletion":
            del data[at : at + rng.choice((1, 8, 1000))]
        elif kind == "header text":
            text = _mutated_text(rng, bytes(data[8:end]))
            data[:end] = len(text).to_bytes(8, "little") + text
        else:
            header = json.loads(data[8:end])
            for _ in range(rng.choice((1, 1, 3))):
                _change_somewhere(rng, header)
            text = json.dumps(header).encode()
            data[:end] = len(text).to_bytes(8, "little") + text
        return kind, bytes(data)

    def _sealed(self, rng: random.Random) -> str:
        """Changes under a checksum that is right, as another program might make them."""
        kind = rng.choice(("sealed metadata", "sealed layers", "sealed bits", "sealed tensors"))
        header, tensors = dict(self.header), {name: x.clone() for name, x in self.tensors.items()}
        name = rng.choice(list(tensors))
        if kind == "sealed metadata":
            key = rng.choice([*header, "new"])
            header[key] = rng.choice(
                (str(rng.choice(_ODD)), json.dumps(rng.choice(_ODD)), header.get(key, "")[:-1])
            )
            if rng.random() < 0.2:
                del header[key]
        elif kind == "sealed layers":
            key = rng.choice(("layers", "sha256", "updated"))
            content = json.loads(header[key])
            for _ in range(rng.choice((1, 1, 3))):
                _change_somewhere(rng, content)
            header[key] = json.dumps(content)
        elif kind == "sealed bits":
            flat = tensors[name].view(-1)
            for _ in range(rng.choice((1, 2, 50))):
                flat[rng.randrange(len(flat))] = rng.randrange(256)
        else:
            tensors[rng.choice((name, "more"))] = torch.zeros(
                [rng.randrange(4) for _ in range(rng.randrange(4))], dtype=torch.uint8
            )
        write_checksummed(self.file, tensors, header)
        return kind

    def _load(self, sealed: bool) -> None:
        masks = MaskSet.load(self.file)
        if not sealed and not _equal(masks, self.masks):
            raise WrongError("a file whose checksum is wrong was read as another mask")
        _require_pattern(masks)

    def _apply(self, sealed: bool) -> None:
        out = self.folder / "out"
        shutil.rmtree(out, ignore_errors=True)
        _run("apply", self.model, self.file, "--out", out)
        self._load(sealed)
        _run("verify", out, "--base", self.model)

    def _compare(self, sealed: bool) -> None:
        shutil.rmtree(self.folder / "compared", ignore_errors=True)
        _run("compare", self.export, self.file, "--out", self.folder / "compared")
        self._load(sealed)

    def _verify(self, sealed: bool) -> None:
        copied = self.folder / "verified"
        shutil.rmtree(copied, ignore_errors=True)
        shutil.copytree(self.export, copied)
        shutil.copyfile(self.file, copied / MASK_FILE)
        status = main(["verify", str(copied), "--base", str(self.model)])
        same = self.file.read_bytes() == self.good
        if (status == 0) != same:
            raise WrongError(
                f"verify ended with {status}, and the file is {'' if same else 'not '}the good one"
            )
        if status:
            raise UserError("does not verify")


def _run(*args: object) -> None:
    status = main([str(arg) for arg in args])
    if status:
        raise SystemExit(status)


def _tiny_model(folder: Path) -> Path:
    sizes: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "vocab_size": 32,
    }
    config = LlamaConfig(num_attention_heads=2, num_key_value_heads=1, **sizes)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def _some_masks(source: ModelSource) -> MaskSet:
    rule, base = NMPattern("2:4"), open_base(source)
    generator = torch.Generator().manual_seed(0)
    layers = {
        name: LayerMask.from_rows(rule.top(torch.rand(base.shape(name), generator=generator)))
        for name in base.files
        if name.endswith("proj.weight")
    }
    return MaskSet(rule, layers, base_model(base, layers))


def _equal(one: MaskSet, other: MaskSet) -> bool:
    same = (one.pattern, one.base, one.updated) == (other.pattern, other.base, other.updated)
    return (
        same
        and one.layers.keys() == other.layers.keys()
        and all(
            torch.equal(one.layers[name].packed, other.layers[name].packed)
            and one.layers[name].shape == other.layers[name].shape
            for name in one.layers
        )
    )


def _require_pattern(masks: MaskSet) -> None:
    """What was read obeys N:M, counted by other means than those that read it."""
    for name, layer in masks.layers.items():
        n, m = masks.pattern.of(name).n, masks.pattern.of(name).m
        rows, columns = layer.shape
        bits = np.unpackbits(layer.packed.numpy(), axis=1, bitorder="little")
        kept = bits[:, :columns].reshape(rows, columns // m, m).sum(axis=2)
        if (kept != n).any() or bits[:, columns:].any():
            raise WrongError(f"{name} was read and breaks {masks.pattern}")


def _mutated_text(rng: random.Random, text: bytes) -> bytes:
    changed = bytearray(text)
    for _ in range(rng.choice((1, 1, 2, 10))):
        at = rng.randrange(len(changed))
        changed[at : at + rng.randrange(3)] = rng.choice(_PIECES)
    return bytes(changed)


def _odd(rng: random.Random) -> object:
    return copy.deepcopy(rng.choice(_ODD))  # what is put somewhere may be changed there


def _change_somewhere(rng: random.Random, content: Any) -> None:
    """Remove, replace or add a value anywhere in nested JSON."""
    if isinstance(content, dict) and content:
        key: Any = rng.choice(list(content))
    elif isinstance(content, list) and content:
        key = rng.randrange(len(content))
    else:
        if isinstance(content, dict):
            content["new"] = _odd(rng)
        return
    inner = content[key]
    if isinstance(inner, dict | list) and rng.random() < 0.7:
        _change_somewhere(rng, inner)
    elif rng.random() < 0.3:
        del content[key]
    elif isinstance(content, dict) and rng.random() < 0.2:
        content[f"{key}2"] = inner
    else:
        content[key] = _odd(rng)
