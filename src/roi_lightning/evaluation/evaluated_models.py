"""The LM arguments of `evaluate`: models, or mask files to be applied to a base model in memory."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, cast

import torch
from transformers import PreTrainedConfig
from transformers.modeling_utils import PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from roi_lightning.data.packing import find_bos
from roi_lightning.errors import UserError
from roi_lightning.export.formats import directory_format
from roi_lightning.export.sidecar import read_sidecar, require_intact
from roi_lightning.masks.mask_set import MaskSet
from roi_lightning.models.base_tensors import open_base
from roi_lightning.models.config import (
    GGUF_DTYPE,
    DType,
    compute_dtype,
    load_config,
    load_tokenizer,
    max_positions,
)
from roi_lightning.models.fingerprint import apply_masks, check_masks_fit
from roi_lightning.models.loading import load_language_model
from roi_lightning.models.source import SIDECAR, ModelSource, resolve_model
from roi_lightning.models.stored_tensors import StoredTensors

_WORD_LENGTH: Final = 4096


@dataclass(frozen=True, eq=False)
class EvaluatedModel:
    """A model to be evaluated, not loaded yet.

    Attributes:
        name: The argument as typed.
        source: Where the weights are stored.
        masks: Applied to them in memory; None for a model taken as it is.
        updated: Whether pruning changed the kept weights; None for a dense model.
        config: The model's configuration.
        tokenizer: Its tokenizer.
    """

    name: str
    source: ModelSource
    masks: MaskSet | None
    updated: bool | None
    config: PreTrainedConfig
    tokenizer: PreTrainedTokenizerBase

    @property
    def max_positions(self) -> int | None:
        """The longest sequence the model was made for, in tokens; None where it names no limit."""
        return max_positions(self.config)

    @property
    def word_length(self) -> int:
        """Tokens it reads at once for the word perplexity: 4,096, or as many as it was made for."""
        return min(_WORD_LENGTH, self.max_positions or _WORD_LENGTH)

    @property
    def bos_id(self) -> int | None:
        """The token that its tokenizer puts before a text; None for nothing."""
        return find_bos(self.tokenizer)

    @property
    def bos(self) -> str | None:
        """The same as text."""
        return None if self.bos_id is None else str(self.tokenizer.convert_ids_to_tokens(self.bos_id))

    def check_weights(self) -> None:
        """Refuse a directory whose weight files are missing or damaged at first sight, or not as exported.

        Raises:
            UserError: Naming the file.
        """
        if not self.source.is_stored:
            return
        weights = set(StoredTensors(self.source.directory).files.values())
        if self.masks is None and self.updated is not None:
            hashes = read_sidecar(self.source.directory, None)["files"]
            require_intact(self.source.directory, {name: hashes.get(name) for name in sorted(weights)})

    def load(self, dtype: DType, device: torch.device, trust_remote_code: bool = False) -> PreTrainedModel:
        """The model on its device, in eval mode, masks applied.

        Args:
            dtype: `auto` for the stored one (of a GGUF base under a mask, what the mask was made for), or on some
                CPUs fp32, see `compute_dtype`.
            device: Where to.
            trust_remote_code: Let the repository's own Python code run.

        Raises:
            UserError: If it can't be read.
        """
        if self.source.form:
            load = directory_format(self.source.form).load
            assert load is not None, "only formats that transformers can't read have an entry in config.json"
            lm = load(self.source.directory, dtype, device)
            return lm.to(compute_dtype(lm.dtype, device)) if dtype == "auto" else lm  # type: ignore[arg-type]
        gguf_dtype = GGUF_DTYPE if self.masks is None else self.masks.base.dtype
        lm = load_language_model(self.source, dtype, trust_remote_code, device=device, gguf_dtype=gguf_dtype)
        if self.masks is not None:
            apply_masks(lm, self.masks)
        return cast(PreTrainedModel, lm.to(device).eval())  # type: ignore[arg-type]


def resolve_evaluated(
    specs: Sequence[str], base: str | None, trust_remote_code: bool = False
) -> list[EvaluatedModel]:
    """Find out what every argument is, and check what can be checked without loading a model.

    Args:
        specs: Each a hub id, a directory (packed or not), a GGUF file, or a mask file (`.safetensors`).
        base: The model that mask files apply to.
        trust_remote_code: Let the repositories' own Python code run.

    Raises:
        UserError: For the first argument that is none of these, or is a mask file that can't be applied to the base.
    """
    models = [_resolve(spec, base, trust_remote_code) for spec in dict.fromkeys(specs)]
    # A GGUF base has to be loaded for this; masks made for the same dtype share it.
    base_tensors = functools.cache(open_base)
    for model in models:
        if model.masks is not None:
            check_masks_fit(base_tensors(model.source, model.masks.base.dtype), model.masks)
    return models


def dense_name(models: Sequence[EvaluatedModel], base: str | None) -> str | None:
    """The row that the others are compared with: `base` if it is among them; the first dense model without one."""
    candidates = [x.name for x in models if (x.updated is None if base is None else x.name == base)]
    return next(iter(candidates), None)


def _resolve(spec: str, base: str | None, trust_remote_code: bool) -> EvaluatedModel:
    if Path(spec).suffix == ".safetensors" and not Path(spec).is_dir():
        masks = _read_masks(spec)
        if base is None:
            raise UserError(f"{spec!r} is a mask file: name the model it applies to with --base")
        source, updated = resolve_model(base, commit=masks.base.revision), cast("bool | None", False)
    else:
        masks, source = None, resolve_model(spec, compressed=True)
        updated = _survivors_updated(source)
    config = load_config(source, trust_remote_code)
    tokenizer = load_tokenizer(source.spec, source.revision, trust_remote_code)
    return EvaluatedModel(spec, source, masks, updated, config, tokenizer)


def _read_masks(spec: str) -> MaskSet:
    masks = MaskSet.load(Path(spec))
    if masks.updated:
        raise UserError(
            f"mask file {spec!r} belongs to weights that pruning changed ({len(masks.updated)} tensors); "
            "evaluate the directory it came from"
        )
    return masks


def _survivors_updated(source: ModelSource) -> bool | None:
    if not source.is_stored or not (source.directory / SIDECAR).is_file():
        return None
    try:
        updated = read_sidecar(source.directory, None).get("updated")
        return None if updated is None else bool(updated)
    except UserError as error:
        raise UserError(f"model {source.spec!r}: its {error}; fetch or write it again") from error
