"""Load a causal language model and freeze it."""

import logging
from typing import Any, Final

import torch
from transformers import AutoModelForCausalLM
from transformers.modeling_utils import PreTrainedModel

from roi_lightning.errors import UserError
from roi_lightning.models.config import GGUF_DTYPE, DType, unreadable
from roi_lightning.models.experts import split_experts
from roi_lightning.models.freezing import cast_to_compute, cast_weights, freeze, quietly
from roi_lightning.models.source import ModelSource
from roi_lightning.utils.dtensor import all_finite
from roi_lightning.utils.progress import working

_log: Final = logging.getLogger(__name__)


def plain_language_model(
    source: ModelSource,
    dtype: DType = "auto",
    trust_remote_code: bool = False,
    attn_implementation: str | None = None,
) -> PreTrainedModel:
    """What `AutoModelForCausalLM.from_pretrained` gives, on the CPU in eval mode; nothing of it is replaced.

    Args:
        source: Where the model is stored.
        dtype: Of the weights; `auto` takes the stored one.
        trust_remote_code: Let the repository's own Python code run.
        attn_implementation: Passed on to transformers (`sdpa`, `eager`, `flash_attention_2`).

    Raises:
        UserError: If it can't be read, or its weights are not those of its configuration.
    """
    options: dict[str, Any] = {} if source.kind == "gguf" else {"use_safetensors": True}
    if attn_implementation:
        options["attn_implementation"] = attn_implementation
    return read_model(
        source,
        AutoModelForCausalLM,
        **source.pretrained,
        dtype=dtype,
        trust_remote_code=trust_remote_code,
        **options,
    )


def load_language_model(
    source: ModelSource,
    dtype: DType = "auto",
    trust_remote_code: bool = False,
    attn_implementation: str | None = None,
    *,
    device: torch.device | None = None,
    gguf_dtype: str = GGUF_DTYPE,
) -> PreTrainedModel:
    """Load a model onto the CPU, frozen, in train mode, every dropout at zero, experts split (see `experts`).

    Train mode matters: transformers skips activation checkpointing in eval mode, and Lightning leaves the
    mode as it finds it. With dropout at zero the two modes compute the same.

    Args:
        source: Where the model is stored.
        dtype: Of the frozen weights; `auto` takes the stored one, or on some CPUs fp32 (see `compute_dtype`).
        trust_remote_code: Let the repository's own Python code run.
        attn_implementation: Passed on to transformers (`sdpa`, `eager`, `flash_attention_2`).
        device: Where the model will compute; None if it won't: `auto` is always the stored dtype then.
        gguf_dtype: What `auto` takes for the stored dtype of a GGUF file.

    Raises:
        UserError: If it can't be read, or has NaN or infinite weights.
    """
    is_gguf = source.kind == "gguf"
    lm = plain_language_model(source, "float32" if is_gguf else dtype, trust_remote_code, attn_implementation)
    split_experts(lm)
    if is_gguf:
        _forget_gguf(lm)
        cast_weights(lm, getattr(torch, gguf_dtype if dtype == "auto" else dtype))
    _check_weights(lm, source)
    if dtype == "auto" and device is not None:
        cast_to_compute(lm, device)
    return freeze(lm)


def read_model(source: ModelSource, kind: Any, **options: Any) -> PreTrainedModel:
    """What transformers reads, if it finds a tensor for every parameter.

    Args:
        source: For errors.
        kind: The class whose `from_pretrained` is called.
        options: For `from_pretrained`.

    Raises:
        UserError: If it can't be read, or tensors are missing or of another shape.
    """
    try:
        with working(f"loading {source.spec}", has_bar=True), quietly():
            loaded = kind.from_pretrained(
                **options,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # they are refused below, by name
            )
    except UserError:
        raise
    except Exception as error:
        raise unreadable(source, error) from error
    lm: PreTrainedModel = loaded[0]
    _check_report(loaded[1], source)
    return lm


def _check_report(report: dict[str, Any], source: ModelSource) -> None:
    # transformers fills what a checkpoint lacks with random numbers and only mentions it.
    for name, stored, wanted in sorted(report["mismatched_keys"])[:1]:
        raise UserError(
            f"model {source.spec!r}: {name!r} is {list(stored)} and its configuration wants {list(wanted)}; "
            "fetch it again"
        )
    if lacking := sorted(report["missing_keys"]):
        raise UserError(
            f"model {source.spec!r} lacks {len(lacking)} tensors, {lacking[0]!r} first; fetch it again"
        )
    if unknown := sorted(report["unexpected_keys"]):
        _log.warning("model %r: %d tensors are not used, %r first", source.spec, len(unknown), unknown[0])


def _check_weights(lm: PreTrainedModel, source: ModelSource) -> None:
    for name, weight in lm.named_parameters():
        if not all_finite(weight):
            raise UserError(f"model {source.spec!r} has NaN or infinity in {name!r}; fetch it again")


def _forget_gguf(lm: PreTrainedModel) -> None:
    # The weights are plain tensors now, but transformers would refuse to save them as "quantized".
    lm.hf_quantizer = None  # type: ignore[assignment]
    if hasattr(lm.config, "quantization_config"):
        del lm.config.quantization_config
