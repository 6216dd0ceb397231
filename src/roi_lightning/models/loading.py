"""Frozen language models: from disk, of one in memory, or of shapes alone."""

import io
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr
from copy import deepcopy
from typing import Any, Final

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.modeling_utils import PreTrainedModel
from transformers.utils import logging as transformers_logging

from roi_lightning.errors import UserError, reason
from roi_lightning.models.config import GGUF_DTYPE, DType, compute_dtype
from roi_lightning.models.experts import is_router
from roi_lightning.models.source import ModelSource, unreadable
from roi_lightning.models.stored_tensors import StoredTensors
from roi_lightning.utils.dtensor import all_finite
from roi_lightning.utils.progress import working

_log: Final = logging.getLogger(__name__)
_DROPOUTS: Final = ("dropout", "pdrop", "layerdrop")
_JITTERS: Final = ("jitter_noise", "input_jitter_noise")


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
    if source.is_stored:
        StoredTensors(source.directory)  # or transformers might read other files
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
    """Load a model onto the CPU, frozen, in train mode, every dropout at zero.

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
    if is_gguf:
        _forget_gguf(lm)
        cast_weights(lm, getattr(torch, gguf_dtype if dtype == "auto" else dtype))
    _check_weights(lm, source)
    if dtype == "auto" and device is not None:
        for parameter in lm.parameters():
            parameter.data = parameter.data.to(compute_dtype(parameter.dtype, device))
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
            what = f"NaN or infinity in {name!r} ({weight.dtype})"
            raise UserError(f"model {source.spec!r} has {what}; give a wider --dtype, or fetch it again")


def _forget_gguf(lm: PreTrainedModel) -> None:
    # The weights are plain tensors now, but transformers would refuse to save them as "quantized".
    lm.hf_quantizer = None  # type: ignore[assignment]
    if hasattr(lm.config, "quantization_config"):
        del lm.config.quantization_config


@contextmanager
def quietly() -> Iterator[None]:
    """Silence transformers, which draws its progress bars into log files too and reports in tables."""
    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        with nullcontext() if sys.stderr.isatty() else redirect_stderr(io.StringIO()):
            yield
    finally:
        transformers_logging.set_verbosity(before)


def meta_language_model(config: PreTrainedConfig, trust_remote_code: bool = False) -> PreTrainedModel:
    """The model's structure on the meta device: shapes without memory.

    Raises:
        UserError: If there is no causal model of this configuration, or its numbers make none.
    """
    try:
        with torch.device("meta"), quietly():
            lm: PreTrainedModel = AutoModelForCausalLM.from_config(
                config, trust_remote_code=trust_remote_code
            )
    except Exception as error:
        kind = config.model_type
        raise UserError(
            f"no causal language model of type {kind!r} can be made: {reason(error)}; give another model"
        ) from error
    return lm


def frozen_view(lm: PreTrainedModel) -> PreTrainedModel:
    """A model as `load_language_model` gives one that shares another's weights and buffers, and nothing else with it.

    Whatever is done to it, the other stays as it is, unless those are changed in place.

    Args:
        lm: Any model, all of it on one device; in any mode.

    Raises:
        UserError: If it is no such model, or its weights are packed.
    """
    _check_usable(lm)
    shared: dict[int, Any] = {id(buffer): buffer for buffer in lm.buffers()}
    for weight in lm.parameters():
        shared[id(weight)] = nn.Parameter(weight.detach(), requires_grad=False)
    return freeze(deepcopy(lm, shared))


def _check_usable(lm: object) -> None:
    kind = type(lm).__name__
    if not isinstance(lm, PreTrainedModel):
        raise UserError(f"a {kind} is no causal language model of transformers; give one")
    devices = sorted({str(weight.device) for weight in lm.parameters()})
    if len(devices) > 1 or "meta" in devices:
        raise UserError(
            f"this {kind} is on {', '.join(devices)}; load it onto one device, without device_map"
        )
    if packed := next((name for name, x in lm.named_parameters() if not x.is_floating_point()), None):
        raise UserError(f"this {kind} is quantised: {packed!r} is packed; load the unquantised model")


def freeze(lm: PreTrainedModel) -> PreTrainedModel:
    """Stop gradients to every weight, set train mode, turn off every dropout and all noise on routes, in place."""
    lm.requires_grad_(False)
    lm.config.use_cache = False
    _zero_noise(lm.config)
    for name, module in lm.named_modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        _zero_noise(module)
        if is_router(name.rpartition(".")[2]):
            # Some draw experts in train mode; left in eval mode, Lightning would warn of it.
            module.register_forward_pre_hook(_to_eval)
            module.register_forward_hook(_to_train)
    lm.train()
    return lm


def enable_checkpointing(lm: PreTrainedModel) -> None:
    """Have every decoder block compute its activations again in the backward pass instead of keeping them."""
    # transformers 5.23 renamed it; the old name warns there and is all that earlier ones have.
    enable = getattr(lm, "activation_checkpointing_enable", lm.gradient_checkpointing_enable)
    enable({"use_reentrant": False})


def _zero_noise(owner: object) -> None:
    for name, value in list(vars(owner).items()):
        known = name in _JITTERS or any(part in name for part in _DROPOUTS)
        if isinstance(value, float) and known:
            setattr(owner, name, 0.0)


def _to_eval(router: nn.Module, *_: object) -> None:
    router.eval()


def _to_train(router: nn.Module, *_: object) -> None:
    router.train()


def cast_weights(lm: PreTrainedModel, dtype: torch.dtype) -> None:
    """Cast the parameters in place, not the buffers: rotary frequencies stay in fp32 whatever the dtype."""
    for parameter in lm.parameters():
        parameter.data = parameter.data.to(dtype)
