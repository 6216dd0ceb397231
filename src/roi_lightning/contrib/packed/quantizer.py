"""Teach transformers the packed format: its own `from_pretrained` and `save_pretrained` read and write it.

Importing this module registers it; `roi_lightning.contrib.packed` does.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, cast

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.core_model_loading import WeightConverter
from transformers.modeling_utils import PreTrainedModel
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin
from typing_extensions import override

from roi_lightning.contrib.packed.decoding import fuse_decoding
from roi_lightning.contrib.packed.format import empty_packed
from roi_lightning.contrib.packed.linear import PackedLinear, speed_up_dense
from roi_lightning.contrib.packed.packable import input_dim
from roi_lightning.contrib.packed.split_experts import split_experts
from roi_lightning.contrib.packed.tensors import INT8, PACKED, STORED, VERSION, Weights, packed_layers
from roi_lightning.errors import UserError

_log: Final = logging.getLogger(__name__)
# The entry of a packed `config.json` by which a transformers that does not know the format ends, and shows its value:
# the name of no weight file.
GUARD: Final = {"transformers_weights": "import roi_lightning.contrib.packed"}
FORMER_GUARD: Final = {"transformers_weights": "import roi_lightning.runtime"}


@register_quantization_config(PACKED)
class PackedConfig(QuantizationConfigMixin):
    """The `quantization_config` in a packed model's `config.json`.

    Args:
        layers: The names of packed tensors in a dense checkpoint.
        weights: How kept weights are held.
        version: Of the format.
        quant_method: Always the same.

    Raises:
        UserError: If it is not one that this release writes.
    """

    def __init__(
        self,
        layers: list[str],
        weights: Weights = STORED,
        version: int = VERSION,
        quant_method: str = PACKED,
    ) -> None:
        if version != VERSION or weights not in (STORED, INT8):
            raise UserError(
                f"the packed model has {weights!r} weights in version {version!r} of the format, which this release "
                "of roi-lightning does not know; install a newer one"
            )
        self.layers, self.weights, self.version = list(layers), weights, version
        self.quant_method = quant_method  # type: ignore[assignment]


def packed_configuration(dense: Mapping[str, Any], packed: PackedConfig) -> dict[str, Any]:
    """The content of a packed model's `config.json`.

    Args:
        dense: That of the dense model's.
        packed: What transformers is told of the weights.
    """
    return {**dense, **GUARD, "quantization_config": packed.to_dict()}


@register_quantizer(PACKED)
class PackedQuantizer(HfQuantizer):
    """Puts `PackedLinear` where a checkpoint holds packed weights, and lets transformers fill it.

    Raises:
        UserError: If it is to pack a dense model while it is loaded.
    """

    quantization_config: PackedConfig

    def __init__(self, quantization_config: PackedConfig, **options: Any) -> None:
        super().__init__(quantization_config, **options)
        if not self.pre_quantized:
            raise UserError(
                "a dense model is not packed while it is loaded: load it and call accelerate(model), "
                "or write a packed directory first (`roi-lightning pack`)"
            )

    @override
    def update_attn_implementation(self, config: PreTrainedConfig) -> PreTrainedConfig:
        """Take away the guard, which is there for a transformers without this class."""
        for name in GUARD.keys() & vars(config).keys():
            delattr(config, name)
        return config

    @override
    def _process_model_before_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> PreTrainedModel:
        stacked = split_experts(model)
        packed = packed_layers(model, self.quantization_config.layers)
        if not any(layer.startswith(f"{name}.") for name in stacked for layer in packed):
            for name, module in stacked.items():
                model.set_submodule(name, module)
        is_int8 = self.quantization_config.weights == INT8
        for name in packed:
            layer = model.get_submodule(name)
            weight, bias = layer.get_parameter("weight"), cast("Tensor | None", layer.bias)
            rows, inputs = weight.shape if input_dim(layer) else weight.T.shape
            values = empty_packed((rows, inputs), torch.int8 if is_int8 else weight.dtype, weight.device)
            model.set_submodule(name, PackedLinear(values, bias))
        self._shapes = {key: tensor.shape for key, tensor in _packed_tensors(model)}
        return model

    @override
    def update_weight_conversions(self, weight_conversions: list[Any], model: PreTrainedModel) -> list[Any]:
        """Leave out what would stack experts that have layers of their own here."""
        names = list(model.state_dict())
        return [rule for rule in weight_conversions if not _stacks_split_experts(rule, names)]

    @override
    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> PreTrainedModel:
        for key, tensor in _packed_tensors(model):
            # transformers marks what it has read; up to 5.22 that has whatever shape it had in the file.
            if not getattr(tensor, "_is_hf_initialized", False) or tensor.shape != self._shapes[key]:
                raise UserError(
                    f"{key!r} of the packed model is missing or of another shape than its configuration wants; "
                    "fetch it again, or pack it again"
                )
        if any(tensor.is_cuda for _, tensor in _packed_tensors(model)):
            return self._dequantize(model)
        speed_up_dense(model)
        fuse_decoding(model)
        return model

    def _dequantize(self, model: PreTrainedModel, dtype: Any = None) -> PreTrainedModel:
        """Unpack every layer, in place: what runs on GPUs, and what `model.dequantize()` leaves."""
        _log.warning(
            "%s is unpacked: packed layers are fast on CPUs alone", model.config.name_or_path or "the model"
        )
        vars(model.base_model).pop("forward", None)  # one call for all blocks is for packed ones
        for name, layer in list(model.named_modules()):
            if isinstance(layer, PackedLinear):
                model.set_submodule(name, layer.unpacked(dtype or model.dtype))
        return model

    @override
    def is_serializable(self) -> bool:
        return True

    @property
    @override
    def is_trainable(self) -> bool:
        return False

    @property
    @override
    def is_compileable(self) -> bool:
        return True


def _packed_tensors(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    for name, layer in model.named_modules():
        if isinstance(layer, PackedLinear):
            yield from ((f"{name}.{key}", tensor) for key, tensor in layer.named_buffers())


def _stacks_split_experts(rule: object, names: Iterable[str]) -> bool:
    if not isinstance(rule, WeightConverter) or not any(
        ".experts." in source for source in rule.source_patterns
    ):
        return False
    return not any(name.endswith(rule.target_patterns[0]) for name in names)
