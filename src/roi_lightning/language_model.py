"""Load a causal language model and freeze it, or build its shape alone."""

import io
import logging
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr
from copy import deepcopy
from functools import lru_cache
from typing import Any, Final, Literal

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig
from transformers.modeling_utils import PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from roi_lightning.attention import widen_attention
from roi_lightning.errors import UserError
from roi_lightning.experts import is_router, split_experts
from roi_lightning.products import widen_products
from roi_lightning.shards import all_finite
from roi_lightning.sources import HUB_REMEDY, ModelSource, resolve_model

DType = Literal["auto", "float32", "bfloat16", "float16"]
_log: Final = logging.getLogger(__name__)
_LONGEST_REASON: Final = 200
_DROPOUTS: Final = ("dropout", "pdrop", "layerdrop")
_JITTERS: Final = ("jitter_noise", "input_jitter_noise")


def load_config(source: ModelSource, trust_remote_code: bool = False) -> PreTrainedConfig:
    """Read a model's configuration; no weight is touched.

    Raises:
        UserError: If transformers can't read it.
    """
    if source.kind != "gguf" or source.path is None:
        return _read_config(source, trust_remote_code)
    # A GGUF file tells its configuration after its whole vocabulary, which takes seconds.
    stat = source.path.stat()
    return deepcopy(_known_config(source, trust_remote_code, (stat.st_mtime_ns, stat.st_size)))


@lru_cache(maxsize=4)
def _known_config(source: ModelSource, trust_remote_code: bool, _stamp: tuple[int, int]) -> PreTrainedConfig:
    return _read_config(source, trust_remote_code)


def _read_config(source: ModelSource, trust_remote_code: bool) -> PreTrainedConfig:
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(
            **source.configured, trust_remote_code=trust_remote_code
        )
        return config
    except Exception as error:
        raise _unreadable(source, error) from error


def max_positions(config: PreTrainedConfig) -> int | None:
    """The longest sequence a model was made for, in tokens; None where its configuration names no limit."""
    text = config.get_text_config()
    found = (getattr(text, key, None) for key in ("max_position_embeddings", "n_positions", "n_ctx"))
    return next((int(value) for value in found if value is not None), None)


def check_length(source: ModelSource, seq_len: int, trust_remote_code: bool = False) -> None:
    """Refuse windows longer than a model takes.

    Raises:
        UserError: Naming both lengths, or if the configuration can't be read.
    """
    check_positions(source.spec, load_config(source, trust_remote_code), seq_len)


def check_positions(spec: str, config: PreTrainedConfig, seq_len: int) -> None:
    """Refuse windows longer than the model of a configuration takes.

    Raises:
        UserError: Naming both lengths.
    """
    longest = max_positions(config)
    if longest is not None and seq_len > longest:
        raise UserError(
            f"data.seq_len is {seq_len} and model {spec!r} reads at most {longest} tokens; lower it"
        )


def load_tokenizer(
    spec: str, revision: str | None = None, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """The tokenizer that belongs to a model.

    Raises:
        UserError: If the model can't be found or has no tokenizer.
    """
    source = resolve_model(spec, revision, packed=True)
    options = {"config": load_config(source, trust_remote_code)} if source.kind == "packed" else {}
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            **source.pretrained, trust_remote_code=trust_remote_code, **options
        )
    except Exception as error:
        raise _unreadable(source, error) from error
    if len(tokenizer) <= len(set(tokenizer.all_special_tokens)):
        # What transformers makes of a directory that has lost its tokenizer.json.
        raise UserError(f"model {source.spec!r} has no tokenizer that knows any text; fetch it again")
    return tokenizer


def plain_language_model(
    source: ModelSource,
    dtype: DType = "auto",
    trust_remote_code: bool = False,
    attn_implementation: str | None = None,
) -> PreTrainedModel:
    """What `AutoModelForCausalLM.from_pretrained` gives, on the CPU in eval mode; nothing of it is replaced.

    Args:
        source: Where the model lies.
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
) -> PreTrainedModel:
    """Load a model onto the CPU, frozen, in train mode, every dropout at zero, experts split (see `experts`).

    Train mode matters: transformers skips activation checkpointing in eval mode, and Lightning leaves the
    mode as it finds it. With dropout at zero the two modes compute the same.

    Args:
        source: Where the model lies.
        dtype: Of the frozen weights; `auto` takes the stored one (bfloat16 for a GGUF file).
        trust_remote_code: Let the repository's own Python code run.
        attn_implementation: Passed on to transformers (`sdpa`, `eager`, `flash_attention_2`).

    Raises:
        UserError: If it can't be read, or has weights that are no numbers.
    """
    is_gguf = source.kind == "gguf"
    lm = plain_language_model(source, "float32" if is_gguf else dtype, trust_remote_code, attn_implementation)
    split_experts(lm)
    if is_gguf:
        _forget_gguf(lm)
        cast_weights(lm, torch.bfloat16 if dtype == "auto" else getattr(torch, dtype))
    _check_weights(lm, source)
    return freeze(widened(lm))


def read_model(
    source: ModelSource, kind: Any, absent: Collection[str] = (), **options: Any
) -> PreTrainedModel:
    """What transformers reads, if it finds a tensor for every parameter.

    Args:
        source: For errors.
        kind: The class whose `from_pretrained` is called.
        absent: Parameters that may be missing.
        options: For `from_pretrained`.

    Raises:
        UserError: If it can't be read, or tensors are missing or of another shape.
    """
    try:
        with _quietly():
            loaded = kind.from_pretrained(
                **options,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # they are refused below, by name
            )
    except Exception as error:
        raise _unreadable(source, error) from error
    lm: PreTrainedModel = loaded[0]
    _check_report(loaded[1], source, absent)
    return lm


def _check_report(report: dict[str, Any], source: ModelSource, absent: Collection[str]) -> None:
    # transformers fills what a checkpoint lacks with random numbers and only mentions it.
    for name, stored, wanted in sorted(report["mismatched_keys"])[:1]:
        raise UserError(
            f"model {source.spec!r}: {name!r} is {list(stored)} and its configuration wants {list(wanted)}; "
            "fetch it again"
        )
    if lacking := sorted(set(report["missing_keys"]).difference(absent)):
        raise UserError(
            f"model {source.spec!r} lacks {len(lacking)} tensors, {lacking[0]!r} first; fetch it again"
        )
    if unknown := sorted(report["unexpected_keys"]):
        _log.warning("model %r: %d tensors are not used, %r first", source.spec, len(unknown), unknown[0])


def _check_weights(lm: PreTrainedModel, source: ModelSource) -> None:
    for name, weight in lm.named_parameters():
        if not all_finite(weight):
            raise UserError(f"model {source.spec!r} has NaN or infinity in {name!r}; fetch it again")


@contextmanager
def _quietly() -> Iterator[None]:
    # transformers draws its bars into log files too, one long line of them, and reports in tables.
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
        with torch.device("meta"), _quietly():
            lm: PreTrainedModel = AutoModelForCausalLM.from_config(
                config, trust_remote_code=trust_remote_code
            )
    except Exception as error:
        kind = config.model_type
        raise UserError(
            f"no causal language model of type {kind!r} can be made: {_reason(error)}; give another model"
        ) from error
    split_experts(lm)
    return lm


def random_language_model(
    source: ModelSource, device: torch.device, dtype: DType = "auto"
) -> PreTrainedModel:
    """A frozen model of the source's shape with random weights, bfloat16 for `auto`; no weight is read."""
    lm = plain_random_model(source, device, dtype)
    split_experts(lm)
    return freeze(widened(lm))


def plain_random_model(source: ModelSource, device: torch.device, dtype: DType = "auto") -> PreTrainedModel:
    """What `AutoModelForCausalLM.from_config` gives; nothing of it is replaced, and no weight is read."""
    kind = torch.bfloat16 if dtype == "auto" else getattr(torch, dtype)
    with torch.device(device):
        lm: PreTrainedModel = AutoModelForCausalLM.from_config(load_config(source), dtype=kind)
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
    view = deepcopy(lm, shared)
    split_experts(view)
    return freeze(widened(view))


def _check_usable(lm: object) -> None:
    kind = type(lm).__name__
    if not isinstance(lm, PreTrainedModel):
        raise UserError(f"a {kind} is no causal language model of transformers; give one")
    devices = sorted({str(weight.device) for weight in lm.parameters()})
    if len(devices) > 1 or "meta" in devices:
        raise UserError(
            f"this {kind} lies on {', '.join(devices)}; load it onto one device, without device_map"
        )
    if packed := next((name for name, x in lm.named_parameters() if not x.is_floating_point()), None):
        raise UserError(f"this {kind} is quantised: {packed!r} is packed; load the unquantised model")


def widened(lm: PreTrainedModel) -> PreTrainedModel:
    """The model, computing in fp32 where its own numbers are slow."""
    widen_attention()
    return widen_products(lm)


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


def _forget_gguf(lm: PreTrainedModel) -> None:
    # The weights are plain tensors now, but transformers would refuse to save them as "quantized".
    lm.hf_quantizer = None  # type: ignore[assignment]
    if hasattr(lm.config, "quantization_config"):
        del lm.config.quantization_config


def cast_weights(lm: PreTrainedModel, dtype: torch.dtype) -> None:
    """Cast the parameters in place, not the buffers: rotary frequencies stay in fp32 whatever the dtype."""
    for parameter in lm.parameters():
        parameter.data = parameter.data.to(dtype)


def _unreadable(source: ModelSource, error: Exception) -> UserError:
    remedy = HUB_REMEDY if source.kind == "hub" else "fetch it again, or give another model"
    if "trust_remote_code" in str(error):
        remedy = "set trust_remote_code if you trust it, or give another model"
    return UserError(f"model {source.spec!r} ({source.kind}) can't be read: {_reason(error)}; {remedy}")


def _reason(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    said = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
    return said if len(said) <= _LONGEST_REASON else f"{said[:_LONGEST_REASON]} …"
