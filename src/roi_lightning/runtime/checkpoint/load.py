"""Load a packed directory as a transformers model that never had its dense weights.

transformers builds the model on the meta device and loads what was not packed, with all it knows of names, tied
weights and buffers; the weights of the other layers are empty meanwhile, so that it makes up nothing for them.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedConfig
from transformers.modeling_utils import PreTrainedModel

from roi_lightning.errors import UserError
from roi_lightning.export.sidecar import PACKED, read_sidecar, require_intact
from roi_lightning.models.config import DType, load_config
from roi_lightning.models.experts import expert_layers, split_experts
from roi_lightning.models.freezing import meta_language_model
from roi_lightning.models.layers import input_dim
from roi_lightning.models.loading import read_model
from roi_lightning.models.source import ModelSource, is_packed, resolve_model
from roi_lightning.models.weight_names import stored_names
from roi_lightning.runtime.checkpoint.tensors import PackedTensors, packed_layers
from roi_lightning.runtime.dense_linear import speed_up_dense
from roi_lightning.runtime.packed_linear import PackedLinear
from roi_lightning.runtime.prepare import prepare_layers, refuse_saving
from roi_lightning.runtime.semi_structured import check_device


def from_packed(
    directory: str | Path,
    dtype: DType = "auto",
    device: str | torch.device | None = None,
    *,
    large_batches: bool = False,
) -> PreTrainedModel:
    """Load a packed directory, in eval mode, frozen; it takes as much memory as its files.

    Args:
        directory: What `pack` wrote, or a hub id of it.
        dtype: Of the activations, and of all weights but int8 ones; `auto` takes the stored one. On a CPU without
            instructions for it `float32` reads long prompts faster; weights of 16 bits take twice the memory then.
        device: Where to; the CPU if left out.
        large_batches: Pack each layer once more, see `accelerate`; int8 ones can't be, which is logged.

    Raises:
        UserError: If it is no packed directory, or any of its files is missing or has changed since it was packed;
            if `large_batches` is asked for where it can't be had.
    """
    target = torch.device(device or "cpu")
    if large_batches:
        check_device(target)
    source = _packed_source(str(directory))
    tensors = open_packed(source.directory)
    lm = speed_up_dense(_load(source, tensors, dtype))
    lm.requires_grad_(False)
    lm.config.name_or_path = source.spec
    if (source.directory / "generation_config.json").is_file():
        lm.generation_config = GenerationConfig.from_pretrained(source.directory)
    refuse_saving(lm)
    lm.to(target)  # type: ignore[arg-type]
    layers = {name: layer for name, layer in lm.named_modules() if isinstance(layer, PackedLinear)}
    prepare_layers(layers, lm.dtype, large_batches)
    return cast(PreTrainedModel, lm.eval())


def open_packed(directory: Path) -> PackedTensors:
    """The tensors of a packed directory, once all its files have been hashed.

    Raises:
        UserError: If any of them is missing or has changed since it was packed.
    """
    try:
        sidecar = read_sidecar(directory, (PACKED,))
    except UserError as error:
        raise UserError(f"{str(directory)!r}: its {error}; fetch or pack it again") from error
    require_intact(directory, sidecar["files"])
    return PackedTensors(directory)


def _packed_source(spec: str) -> ModelSource:
    source = resolve_model(spec, packed=True)
    if not is_packed(source.directory):
        raise UserError(
            f"{spec!r} is not packed: load it with transformers' from_pretrained, or pack it first "
            "(`roi-lightning pack`)"
        )
    return ModelSource(spec, "packed", source.directory)


@dataclass(frozen=True)
class _Plan:
    """Which layers get their weights here and not from transformers.

    Attributes:
        kind: The model's class.
        splits: Whether experts get layers of their own, since some of them are packed.
        packed: The name of the weight in a dense checkpoint, by layer.
        plain: The same of dense layers beside packed ones in split experts.
    """

    kind: type[PreTrainedModel]
    splits: bool
    packed: dict[str, str]
    plain: dict[str, str]

    @property
    def weights(self) -> list[str]:
        """The parameters that transformers does not find."""
        return [f"{name}.weight" for name in (*self.packed, *self.plain)]


def _load(source: ModelSource, tensors: PackedTensors, dtype: DType) -> PreTrainedModel:
    config = load_config(source)
    plan = _plan(meta_language_model(config), tensors)
    lm = read_model(
        source,
        _without_weights(plan),
        absent=plan.weights,
        pretrained_model_name_or_path=None,
        config=config,
        state_dict={name: tensors[name] for name in tensors.others if name not in plan.plain.values()},
        dtype=dtype,
    )
    lm.__class__ = plan.kind
    for name, stored in plan.plain.items():
        lm.get_submodule(name).weight = nn.Parameter(tensors[stored].to(lm.dtype))
    for name, stored in plan.packed.items():
        packed = tensors.packed(stored)
        if packed.scales is None:
            packed = packed._replace(values=packed.values.to(lm.dtype))
        bias = cast("Tensor | None", lm.get_submodule(name).bias)
        lm.set_submodule(name, PackedLinear(packed, bias))
    return lm


def _plan(shape: PreTrainedModel, tensors: PackedTensors) -> _Plan:
    packed = packed_layers(shape, tensors.layers)
    for name, stored in packed.items():
        _check_shape(shape, name, stored, tensors)
    experts = expert_layers(shape)
    if experts.isdisjoint(packed):
        return _Plan(type(shape), False, packed, {})
    dense = experts.difference(packed)
    stored_weights = stored_names(shape, [f"{name}.weight" for name in dense], tensors.files)
    return _Plan(type(shape), True, packed, {name: stored_weights[f"{name}.weight"] for name in dense})


def _check_shape(shape: PreTrainedModel, name: str, stored: str, tensors: PackedTensors) -> None:
    weight = shape.get_parameter(f"{name}.weight")
    wanted = weight.shape if input_dim(shape.get_submodule(name)) else weight.T.shape
    if (found := tensors.packed(stored).shape) != tuple(wanted):
        raise UserError(
            f"{str(tensors.directory)!r}: {stored!r} is {list(found)} and its configuration wants {list(wanted)}; "
            "fetch or pack it again"
        )


def _without_weights(plan: _Plan) -> type[PreTrainedModel]:
    """The model's class, but that some weights have no rows; by the same name, which transformers goes by."""

    def init(self: Any, config: PreTrainedConfig) -> None:
        plan.kind.__init__(self, config)
        if plan.splits:
            split_experts(self)
        for name in (*plan.packed, *plan.plain):
            layer = self.get_submodule(name)
            layer.weight = nn.Parameter(layer.weight[:0].detach())

    return type(plan.kind.__name__, (plan.kind,), {"__init__": init, "__module__": plan.kind.__module__})
