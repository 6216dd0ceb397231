"""How llama.cpp names, lays out and configures the models that are written as GGUF.

What a file can't say is refused: llama.cpp would run another model without a word.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, get_tensor_name_map
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from roi_lightning.errors import UserError

Metadata = dict[str, int | float | str]
_ROPE_FREQUENCIES: Final = "rope_freqs.weight"
# Whatever else YaRN can be given llama.cpp takes its own default for.
_YARN: Final = frozenset(
    ("rope_type", "rope_theta", "partial_rotary_factor", "factor", "original_max_position_embeddings")
)


@dataclass(frozen=True)
class Architecture:
    """One of llama.cpp's.

    Attributes:
        id: As the gguf package has it.
        act: What the configuration has to name as its activation.
        biases: Layers that may have one.
        alternating: Whether the two halves of what is rotated in a head alternate in the rows of q and k.
        norm_offset: Added to norm weights: Gemma's norms multiply by 1 + weight, llama.cpp's by what is stored.
        more: Further metadata, and a check of what can't be said.
    """

    id: MODEL_ARCH
    act: str = "silu"
    biases: tuple[str, ...] = ()
    alternating: bool = False
    norm_offset: float = 0.0
    more: Callable[[PreTrainedConfig], Metadata] = lambda _: {}

    @property
    def name(self) -> str:
        """As in `general.architecture`."""
        return str(MODEL_ARCH_NAMES[self.id])


def architecture(config: PreTrainedConfig) -> Architecture:
    """The architecture of a model.

    Raises:
        UserError: If it is none of those that are written, or has a setting that llama.cpp does not know.
    """
    found = _ARCHITECTURES.get(config.model_type)
    if found is None:
        raise UserError(
            f"models of type {config.model_type!r} are not written as GGUF; {', '.join(_ARCHITECTURES)} are: use "
            "llama.cpp's own convert_hf_to_gguf.py on the directory"
        )
    _require(_activation(config), found.act, "activation", config)
    return found


def metadata(config: PreTrainedConfig) -> Metadata:
    """The keys of the architecture's own section, and their values.

    Raises:
        UserError: See `architecture`.
    """
    head = head_size(config)
    theta, scaling = _rope(config)
    return {
        "vocab_size": config.vocab_size,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": head,
        "attention.value_length": head,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope.dimension_count": head,
        "rope.freq_base": theta,
        **scaling,
        **architecture(config).more(config),
    }


def head_size(config: PreTrainedConfig) -> int:
    """Dimensions of an attention head."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def gguf_names(config: PreTrainedConfig, names: Iterable[str]) -> dict[str, str]:
    """Names of tensors on disk → their names in the GGUF file; a head that repeats the embeddings is left out.

    Raises:
        UserError: If llama.cpp has no such tensor.
    """
    arch = architecture(config)
    known = get_tensor_name_map(arch.id, config.num_hidden_layers)
    found: dict[str, str] = {}
    for name in names:
        if config.tie_word_embeddings and name == "lm_head.weight":
            continue
        stem, _, kind = name.rpartition(".")
        renamed = known.get_name(stem)
        if renamed is None or (kind == "bias" and stem.rpartition(".")[2] not in arch.biases):
            raise UserError(f"llama.cpp's {arch.name} models have no tensor {name!r}; it can't be written")
        found[name] = f"{renamed}.{kind}"
    return found


def laid_out(config: PreTrainedConfig, name: str, tensor: Tensor) -> Tensor:
    """A tensor as llama.cpp wants it, in float32; groups of N:M, along the last dimension, stay together.

    Args:
        config: Of the model.
        name: In the GGUF file.
        tensor: As on disk.
    """
    arch, values = architecture(config), tensor.float()
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    layer = name.split(".")[-2]
    if arch.alternating and layer in heads:
        halves = values.reshape(heads[layer], 2, -1, *values.shape[1:])
        return halves.transpose(1, 2).reshape(values.shape)
    return values + arch.norm_offset if "norm" in layer else values


def extra_tensors(config: PreTrainedConfig) -> dict[str, Tensor]:
    """Tensors that are no weights: what llama3's rotation divides its frequencies by, float32."""
    rope = config.rope_parameters
    if rope.get("rope_type") != "llama3":
        return {}
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    exponents = torch.arange(0, head_size(config), 2, dtype=torch.float32) / head_size(config)
    plain: Tensor = rope["rope_theta"] ** -exponents
    return {_ROPE_FREQUENCIES: plain / scaled}


def _rope(config: PreTrainedConfig) -> tuple[float, Metadata]:
    """The base of the rotation's frequencies, and how they are scaled."""
    rope: Mapping[str, Any] = config.rope_parameters
    rope = rope.get("full_attention", rope)
    kind, theta = rope.get("rope_type", "default"), float(rope["rope_theta"])
    _require(rope.get("partial_rotary_factor", 1.0), 1.0, "partial_rotary_factor", config)
    if kind in ("default", "llama3"):
        return theta, {}
    if kind == "linear":
        return theta, {"rope.scaling.type": kind, "rope.scaling.factor": float(rope["factor"])}
    if kind == "yarn" and {key for key, value in rope.items() if value is not None} <= _YARN:
        length = rope.get("original_max_position_embeddings", config.max_position_embeddings)
        scaling: Metadata = {"rope.scaling.type": kind, "rope.scaling.factor": float(rope["factor"])}
        return theta, scaling | {"rope.scaling.original_context_length": int(length)}
    raise UserError(f"positions of the kind {kind!r}, as they are set up here, are not written as GGUF")


def _llama(config: PreTrainedConfig) -> Metadata:
    _require(getattr(config, "sliding_window", None), None, "sliding_window", config)
    return {}


def _qwen(config: PreTrainedConfig) -> Metadata:
    _require(config.use_sliding_window, False, "use_sliding_window", config)
    return {}


def _gemma2(config: PreTrainedConfig) -> Metadata:
    _require_window(config, period=2)
    _require_scale(config, layers_of_largest=46)
    return {
        "attn_logit_softcapping": float(config.attn_logit_softcapping),
        "final_logit_softcapping": float(config.final_logit_softcapping),
        "attention.sliding_window": config.sliding_window,
    }


def _gemma3(config: PreTrainedConfig) -> Metadata:
    _require_window(config, period=6)
    _require_scale(config, layers_of_largest=62)
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        _require(getattr(config, name, None), None, name, config)
    _require(
        getattr(config, "use_bidirectional_attention", None) or False,
        False,
        "use_bidirectional_attention",
        config,
    )
    rope = config.rope_parameters["sliding_attention"]
    _require(
        (rope["rope_theta"], rope.get("rope_type", "default")), (10000.0, "default"), "local rotation", config
    )
    return {"attention.sliding_window": config.sliding_window}


def _require_window(config: PreTrainedConfig, period: int) -> None:
    """Every so many layers one attends to everything, as llama.cpp has it built in."""
    full = [(i + 1) % period == 0 for i in range(config.num_hidden_layers)]
    names = ["full_attention" if each else "sliding_attention" for each in full]
    _require(list(config.layer_types), names, "layer_types", config)


def _require_scale(config: PreTrainedConfig, layers_of_largest: int) -> None:
    """llama.cpp knows the scale of attention by the number of layers."""
    largest = config.num_hidden_layers == layers_of_largest
    wanted = config.hidden_size / config.num_attention_heads if largest else head_size(config)
    _require(config.query_pre_attn_scalar, wanted, "query_pre_attn_scalar", config)


def _activation(config: PreTrainedConfig) -> str:
    return str(getattr(config, "hidden_activation", None) or config.hidden_act)


def _require(value: object, wanted: object, name: str, config: PreTrainedConfig) -> None:
    if value != wanted:
        raise UserError(
            f"the {config.model_type} model's {name} is {value}, and llama.cpp takes it to be {wanted}; it can't be "
            "written as GGUF"
        )


_GELU: Final = "gelu_pytorch_tanh"
_LLAMA: Final = Architecture(
    MODEL_ARCH.LLAMA, biases=("q_proj", "k_proj", "v_proj", "o_proj"), alternating=True, more=_llama
)
_ARCHITECTURES: Final = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": Architecture(MODEL_ARCH.QWEN2, biases=("q_proj", "k_proj", "v_proj"), more=_qwen),
    "qwen3": Architecture(MODEL_ARCH.QWEN3, more=_qwen),
    "gemma2": Architecture(MODEL_ARCH.GEMMA2, act=_GELU, norm_offset=1.0, more=_gemma2),
    "gemma3_text": Architecture(MODEL_ARCH.GEMMA3, act=_GELU, norm_offset=1.0, more=_gemma3),
}
