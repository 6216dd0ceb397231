"""Reorders a model's channels, writes it, and compares what both compute."""

import math
import re
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Final

import torch
from torch import Tensor

from roi_lightning.contrib.permute.channels import find_channels, stored_orders
from roi_lightning.contrib.permute.command import PermuteOptions
from roi_lightning.contrib.permute.directory import write_permuted
from roi_lightning.contrib.permute.permutation import PERMUTATION_FILE, Permutation
from roi_lightning.contrib.permute.reorder import KeptScore, compared_logits, reorder_channels
from roi_lightning.errors import UserError
from roi_lightning.export import check_destination, check_not_base
from roi_lightning.export.sidecar import public_name
from roi_lightning.masks.overlap import kind_of
from roi_lightning.masks.pattern import NMPattern
from roi_lightning.models.base_tensors import open_base
from roi_lightning.models.config import load_config
from roi_lightning.models.fingerprint import base_model
from roi_lightning.models.layers import choose_layers
from roi_lightning.models.loading import (
    cast_weights,
    load_language_model,
    meta_language_model,
    plain_language_model,
)
from roi_lightning.models.source import ModelSource, resolve_model
from roi_lightning.oneshot.prune import calibration_text, calibration_windows
from roi_lightning.utils.devices import choose_device
from roi_lightning.utils.tables import print_table

# Of the largest logit: sums in another order differ by about 1e-5, one channel out of place by much more.
_TOLERANCE: Final = 1e-3


def run(options: PermuteOptions) -> None:
    """Choose the order, write, verify, compare what both models compute, and say what was gained.

    Raises:
        UserError: For a model that can't be reordered or read, and a directory that can't be written.
    """
    source, pattern = resolve_model(options.lm, options.revision), NMPattern(options.pattern)
    _check(source, pattern, options)
    device = choose_device(options.device)
    windows, facts = _text(source, options)
    # As it is stored, so that a GGUF model is rounded as its copy will be; then wider, for the comparison.
    lm = load_language_model(source)
    cast_weights(lm, torch.float32)
    lm.to(device)  # type: ignore[arg-type]
    base = open_base(source, lm=lm)
    channels, left = find_channels(lm, pattern)
    orders, rows = reorder_channels(lm, channels, pattern, windows)
    stored = stored_orders(base, lm, orders)
    original = base_model(base, stored)
    permutation = Permutation(pattern, stored, replace(original, spec=public_name(original.spec)))
    comparison = _Comparison(compared_logits(lm, windows), windows, device)
    del lm  # two models in fp32 would be in memory at once; that of a GGUF file is its tensors, and stays
    out = write_permuted(base, permutation, options.out, facts, comparison, overwrite=options.overwrite)
    _show(f"{source.spec} at {pattern}", rows, left)
    sys.stdout.write(
        f"{out}: written and verified; logits differ by at most {comparison.difference:.0e} of the largest\n"
    )


def _check(source: ModelSource, pattern: NMPattern, options: PermuteOptions) -> None:
    """What can be refused before text or weights are read."""
    if source.is_stored and (source.directory / PERMUTATION_FILE).is_file():
        raise UserError(f"model {source.spec!r} is permuted already; give the original one")
    lm = meta_language_model(load_config(source))
    choose_layers(source.spec, lm, pattern)
    if not find_channels(lm, pattern)[0]:
        raise UserError(
            f"model {source.spec!r} ({type(lm).__name__}) has no channels that are known to change places: no "
            "gate_proj, up_proj and down_proj or the like, no v_proj and o_proj; prune it as it is"
        )
    check_not_base(options.out.absolute(), source)
    size = None if source.kind == "gguf" else open_base(source).nbytes
    check_destination(options.out, size, overwrite=options.overwrite)


def _text(source: ModelSource, options: PermuteOptions) -> tuple[Tensor, dict[str, object]]:
    """The windows of calibration text, and what the sidecar says of them."""
    data = calibration_text(
        source.spec, options.corpora, options.seq_len, options.seed, tokenizer_revision=source.revision
    )
    data.check_model(source.spec, load_config(source))
    windows = calibration_windows(data, options.windows)
    return windows, {"windows": options.windows, "seed": options.seed, **data.facts(options.windows)}


@dataclass
class _Comparison:
    """Of what a written model computes with what its base computes.

    Attributes:
        logits: The base's.
        windows: On which.
        device: Where to compute.
        difference: The largest of two logits, as a share of the largest logit; NaN before the call.
    """

    logits: Tensor
    windows: Tensor
    device: torch.device
    difference: float = math.nan

    def __call__(self, directory: Path) -> None:
        lm = plain_language_model(ModelSource(str(directory), "directory", directory), "float32")
        logits = compared_logits(lm.to(self.device), self.windows)  # type: ignore[arg-type]
        self.difference = float((logits - self.logits).abs().max() / self.logits.abs().max())
        if not self.difference <= _TOLERANCE:
            raise UserError(
                f"the reordered {type(lm).__name__} does not compute the same as before: its logits differ by "
                f"{self.difference:.1g} of the largest, so its layers work together in a way that is not known; "
                "prune the model as it is"
            )


def _show(title: str, rows: Sequence[KeptScore], left: Sequence[str]) -> None:
    kinds = dict.fromkeys(kind_of(row.layer) for row in rows)
    table = [_row(kind, [row for row in rows if kind_of(row.layer) == kind]) for kind in kinds]
    blocks = Counter(re.sub(r"\.\d+\b", ".*", name) for name in left)
    table += [[name, str(count), "as it was", "", ""] for name, count in blocks.items()]
    print_table(["inputs of", "layers", "kept before", "kept after", "lost less by"], table, title)


def _row(kind: str, rows: Sequence[KeptScore]) -> list[str]:
    """The means over layers."""
    # Of a layer that receives nothing but zeros, nothing is lost.
    before = mean(row.before / row.total if row.total else 1.0 for row in rows)
    after = mean(row.after / row.total if row.total else 1.0 for row in rows)
    less = (after - before) / (1 - before) if before < 1 else 0.0
    return [kind, str(len(rows)), f"{before:.2%}", f"{after:.2%}", f"{less:.1%}"]
