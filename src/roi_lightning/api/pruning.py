"""Masks without training for a model in memory."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor
from transformers.modeling_utils import PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from roi_lightning.api.base import base_of
from roi_lightning.api.given import TextForTokenizer
from roi_lightning.attention import attention_put_back
from roi_lightning.data import Corpus
from roi_lightning.devices import choose_device
from roi_lightning.errors import UserError
from roi_lightning.language_model import frozen_view, max_positions
from roi_lightning.masks import MaskSet
from roi_lightning.oneshot import (
    METHODS,
    CalibratedMethod,
    Calibration,
    OneShotMethod,
    calibration_windows,
    prune_model,
)
from roi_lightning.oneshot.layerwise import Activations
from roi_lightning.pattern import NMPattern
from roi_lightning.prunable import checked_layers


@dataclass(frozen=True, eq=False)
class Pruned:
    """What a method makes of a model.

    Attributes:
        masks: What to keep.
        updates: Masked weights whose survivors changed (SparseGPT's), by names on disk, on the CPU; the masks need
            them.
    """

    masks: MaskSet
    updates: dict[str, Tensor]


def prune(
    lm: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None = None,
    corpora: str | Sequence[Corpus | str] = (),
    *,
    method: str | OneShotMethod = "wanda",
    pattern: str = "2:4",
    windows: int = 128,
    seq_len: int = 2048,
    activations: Activations = "sequential",
    targets: Sequence[str] = ("*",),
    ignore: Sequence[str] = (),
    seed: int = 0,
    device: str = "auto",
    spill: Path | None = None,
) -> Pruned:
    """Choose masks as the command `prune` does; the model stays as it is.

    Args:
        lm: Any causal language model, all of it on one device.
        tokenizer: Its own; magnitude needs none.
        corpora: Calibration text: files, globs, hub ids, `python-docs`, or `Corpus` objects; magnitude reads none.
        method: `magnitude`, `wanda`, `sparsegpt`, or one with options of its own (`SparseGPT(update_weights=False)`).
        pattern: N:M, N kept of every M consecutive inputs.
        windows: How many windows of text.
        seq_len: Tokens of each.
        activations: What a block meets, see `Calibration`.
        targets: Glob patterns of the layers to prune.
        ignore: Glob patterns of layers to leave dense.
        seed: Of the choice of windows.
        device: Where blocks run: `auto`, `cpu`, `cuda`, `cuda:N`; they visit it one at a time.
        spill: A folder for the hidden states, else they stay in memory.

    Returns:
        The masks, and the weights that SparseGPT updated.

    Raises:
        UserError: For whatever can't be pruned or read.
    """
    chosen, rule, name = _method(method), NMPattern(pattern), type(lm).__name__
    updates: dict[str, Tensor] = {}
    with attention_put_back():
        view = frozen_view(lm)
        layers = checked_layers(name, view, rule, targets, ignore)
        calibration = None
        if isinstance(chosen, CalibratedMethod):
            data = _text(chosen, tokenizer, corpora, seq_len, seed)
            text = calibration_windows(data, windows, max_positions(view.config))
            calibration = Calibration(text, activations, choose_device(device), spill)
        elif corpora:
            raise UserError(f"{type(chosen).__name__} reads no text; leave out corpora")
        source = base_of(view, layers)

        def keep(name: str, weight: Tensor) -> None:
            updates[name] = weight.cpu()

        return Pruned(prune_model(source, view, layers, chosen, rule, calibration, keep), updates)


def _method(method: str | OneShotMethod) -> OneShotMethod:
    if isinstance(method, OneShotMethod):
        return method
    if method not in METHODS:
        raise UserError(f"no method {method!r}: choose among {', '.join(METHODS)}")
    return METHODS[method]()


def _text(
    method: OneShotMethod,
    tokenizer: PreTrainedTokenizerBase | None,
    corpora: str | Sequence[Corpus | str],
    seq_len: int,
    seed: int,
) -> TextForTokenizer:
    if tokenizer is None or not corpora:
        raise UserError(f"{type(method).__name__} reads text: give the model's tokenizer and corpora")
    return TextForTokenizer(tokenizer, corpora, seq_len=seq_len, seed=seed)
