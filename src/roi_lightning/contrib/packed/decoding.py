"""Have a model decode through `TokenDecoder` whenever it is given one more token of one sequence."""

from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from transformers.cache_utils import DynamicCache, DynamicLayer
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.modeling_utils import PreTrainedModel

from roi_lightning.contrib.packed.cache import PreallocatedLayer
from roi_lightning.contrib.packed.linear import PackedLinear, SmallBatchLinear
from roi_lightning.contrib.packed.token_decoder import TokenDecoder, library, linear_layers

# Inner models whose blocks compute what `cpp/decode.cpp` does.
_KNOWN: Final = frozenset(
    f"transformers.models.{name.lower()}.modeling_{name.lower()}.{name}Model"
    for name in ("Llama", "Mistral", "Qwen2", "Qwen3")
)
# Position embeddings that don't change with the length of what is read.
_FIXED_ROPE: Final = ("default", "linear", "llama3", "yarn")
_LANES: Final = 16
_OUTPUTS: Final = ("output_attentions", "output_hidden_states")
_PLAIN: Final = frozenset(("cache_position", "return_dict", *_OUTPUTS))


def fuse_decoding(lm: PreTrainedModel) -> str | None:
    """Decode through one C++ call for each token, in place; whatever it can't do goes the model's own way.

    That is: more than one token or sequence at a time, padding, gradients, other devices than the CPU, other caches
    than a `DynamicCache`, attention or hidden states as outputs, and a compiled model.

    Args:
        lm: A model for generation, its layers packed or not.

    Returns:
        None, or why it stays as it was.
    """
    inner = lm.base_model
    reason = why_not_fused(inner)
    if reason is None:
        inner.forward = _Forward(inner)
    return reason


def why_not_fused(model: Any) -> str | None:
    """What a model has that the fused decoding lacks, in a few words; None if nothing."""
    kind, config = type(model), model.config
    if f"{kind.__module__}.{kind.__qualname__}" not in _KNOWN:
        return f"{kind.__name__} is not among the known models"
    if getattr(config, "sliding_window", None) and "sliding_attention" in (
        getattr(config, "layer_types", None) or ["sliding_attention"]
    ):
        return "it attends through a sliding window"
    if (rope := config.rope_parameters["rope_type"]) not in _FIXED_ROPE:
        return f"its position embeddings are {rope!r}"
    if config.hidden_act != "silu":
        return f"its activation is {config.hidden_act!r}"
    sizes = config.hidden_size, config.intermediate_size, model.layers[0].self_attn.head_dim
    if any(size % _LANES for size in sizes):
        return f"not all of its sizes are multiples of {_LANES}: {sizes}"
    return _why_not_weights(model)


def _why_not_weights(model: Any) -> str | None:
    if len({str(weight.device) for weight in model.parameters()} | {"cpu"}) > 1:
        return "it is not on the CPU"
    if odd := {str(weight.dtype) for weight in model.parameters()} - {str(model.dtype)}:
        return f"its weights are {model.dtype} and {min(odd)}"
    for layer in (layer for block in model.layers for layer in linear_layers(block)):
        if type(layer) not in (nn.Linear, SmallBatchLinear, PackedLinear):
            return f"a layer is {type(layer).__name__}"
        weight = layer.weight
        if weight.dtype not in (model.dtype, torch.int8) or not weight.is_cpu or not weight.is_contiguous():
            return f"a weight is {weight.dtype} on {weight.device}, or not contiguous"
    if any(module._forward_hooks or module._forward_pre_hooks for module in model.modules()):
        return "there are hooks in it"
    return None if library(model.dtype) else f"there is no kernel for {model.dtype}"


class _Forward:
    """What an inner model does when it is called.

    Args:
        model: The model; its own `forward` does what the decoder can't.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._decoder: TokenDecoder | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        model = self._model
        if not args and not is_compiling() and (decoder := self._decoder_for(**kwargs)) is not None:
            past, position = kwargs["past_key_values"], kwargs.get("position_ids")
            place = past.get_seq_length() if position is None else int(position)
            hidden = decoder.step(model.embed_tokens(kwargs["input_ids"]), place, past)
            return BaseModelOutputWithPast(last_hidden_state=hidden, past_key_values=past)
        return type(model).forward(model, *args, **kwargs)

    def _decoder_for(
        self,
        input_ids: Tensor | None = None,
        past_key_values: Any = None,
        attention_mask: Any = None,
        inputs_embeds: Tensor | None = None,
        position_ids: Tensor | None = None,
        use_cache: bool | None = None,
        **options: Any,
    ) -> TokenDecoder | None:
        """What can do a call; None if it is not one more token of one sequence, or more is asked for."""
        model = self._model
        if input_ids is None or input_ids.numel() != 1 or inputs_embeds is not None or use_cache is False:
            self._decoder = None  # which holds weights that the model may have no longer
            return None
        plain = _is_plain(model, options) and _sees_all(attention_mask)
        if not plain or not _holds_one(model, past_key_values):
            return None
        if self._decoder is None or not self._decoder.goes_on(model, past_key_values):
            self._decoder = TokenDecoder(model) if _why_not_weights(model) is None else None
        return self._decoder

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the decoder, which knows addresses, from copies."""
        return {"_model": self._model, "_decoder": None}


def _is_plain(model: Any, options: dict[str, Any]) -> bool:
    """Whether nothing but the next hidden state is wanted."""
    if torch.is_grad_enabled() or model.training or torch.is_autocast_enabled("cpu"):
        return False
    if not options.keys() <= _PLAIN or options.get("return_dict") is False:
        return False
    return not any(options.get(name) or getattr(model.config, name, False) for name in _OUTPUTS)


def _sees_all(mask: Any) -> bool:
    return mask is None or (isinstance(mask, Tensor) and mask.ndim == 2 and bool(mask.all()))


def _holds_one(model: Any, past: Any) -> bool:
    """Whether a cache is of the kind that is written to, and holds one sequence."""
    if type(past) is not DynamicCache or len(past.layers) != len(model.layers) or not past.get_seq_length():
        return False
    layers: list[Any] = past.layers
    return {type(layer) for layer in layers} <= {DynamicLayer, PreallocatedLayer} and len(layers[0].keys) == 1
