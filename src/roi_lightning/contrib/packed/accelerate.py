"""Replace the 2:4 layers of a model by packed ones, which hold and read nine sixteenths of the bytes."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, NoReturn

from torch import Tensor, nn
from transformers.modeling_utils import PreTrainedModel

from roi_lightning.contrib.packed.decoding import fuse_decoding
from roi_lightning.contrib.packed.format import Packed, pack
from roi_lightning.contrib.packed.linear import PackedLinear, speed_up_dense
from roi_lightning.contrib.packed.packable import Dense, Owners, input_dim, owners_of, split_packable
from roi_lightning.contrib.packed.split_experts import split_experts
from roi_lightning.errors import UserError

_SAVING: Final = ("save_pretrained", "push_to_hub")


@dataclass(frozen=True)
class Accelerated:
    """What became of a model's layers.

    Attributes:
        packed: The new layers, by dotted name.
        left: Why a layer stayed as it was, in a line, by its name.
        not_fused: Why each token's blocks are not one C++ call (see `fuse_decoding`); None if they are.
        bytes_before: Of the weights that were packed, as they were.
        bytes_after: Of the same weights, packed.
    """

    packed: dict[str, PackedLinear]
    left: dict[str, str]
    not_fused: str | None
    bytes_before: int
    bytes_after: int


def accelerate(lm: PreTrainedModel) -> Accelerated:
    """Pack every 2:4 layer inside the decoder blocks, in place, and free its dense weight.

    A layer is 2:4 by its weights: at most two of four inputs are not zero. The linear layers that stay dense, the
    head above all, keep their weights and read them as fast where they multiply small batches on a CPU. The model
    computes as before, summed in another order. It can't be trained or saved any more.

    Args:
        lm: In eval mode, on the CPU.

    Raises:
        UserError: If the model is accelerated already, in train mode, or not on the CPU, or has no 2:4 layer.
    """
    _check_state(lm)
    layers, left, owners = _find(lm)
    before = _distinct_bytes(layer.weight for layer in layers.values())
    stacks = {_storage(layer.weight) for layer in layers.values()}
    packed = _swap(lm, layers, owners)
    modules = dict(lm.named_modules())
    for name in left.keys() & modules.keys():
        _leave_stack(modules[name], stacks)
    speed_up_dense(lm)
    not_fused = fuse_decoding(lm)
    _refuse_saving(lm)
    after = _distinct_bytes(part for layer in packed.values() for part in layer.packed.parts)
    return Accelerated(packed, left, not_fused, before, after)


def _check_state(lm: PreTrainedModel) -> None:
    modules = list(lm.modules())
    if count := sum(isinstance(module, PackedLinear) for module in modules):
        raise UserError(f"nothing is left to do: {count} layers of this model are packed already")
    if lm.device.type not in ("cpu", "meta"):
        raise UserError(
            f"this model is on {lm.device}, and packed layers are fast on CPUs; for large batches on a GPU see "
            "torch.sparse.to_sparse_semi_structured"
        )
    if lm.training:
        raise UserError("this model is in train mode, and packed layers can't be trained; call .eval() first")


def _find(lm: PreTrainedModel) -> tuple[dict[str, Dense], dict[str, str], Owners]:
    """What `split_packable` finds; experts get layers of their own where one of them is to be packed."""
    stacked = split_experts(lm)
    owners = owners_of(lm)
    layers: dict[str, Dense] = {}
    try:
        layers, left = split_packable(lm, owners)
    finally:
        for name, module in stacked.items():
            if not any(layer.startswith(f"{name}.") for layer in layers):
                lm.set_submodule(name, module)
    return layers, left, owners


def _swap(lm: nn.Module, layers: dict[str, Dense], owners: Owners) -> dict[str, PackedLinear]:
    """Replace layers one by one, so that only one is there in both forms; empties `layers` and `owners`."""
    packed: dict[str, PackedLinear] = {}
    shared: dict[int, Packed] = {}
    for name in list(layers):
        layer = layers.pop(name)
        key, weight = id(layer.weight), layer.weight.detach()
        if key not in shared:
            shared[key] = pack(weight.t() if input_dim(layer) == 0 else weight, name=name)
        packed[name] = PackedLinear(shared[key], layer.bias)
        for other in [other for other, module in owners[key].items() if module is layer]:
            lm.set_submodule(other, packed[name])
            del owners[key][other]
    return packed


def _leave_stack(layer: nn.Module, stacks: set[int]) -> None:
    """Give a layer a weight of its own if it views a tensor that packed ones viewed too, which can then go."""
    weight = layer.weight
    if isinstance(weight, nn.Parameter) and _storage(weight) in stacks:
        layer.weight = nn.Parameter(weight.detach().clone(), requires_grad=weight.requires_grad)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _distinct_bytes(tensors: Iterable[Tensor]) -> int:
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())


def _refuse_saving(lm: PreTrainedModel) -> None:
    """Have a model refuse to be saved, in place: no loader but ours could read what transformers would write."""
    for name in _SAVING:
        setattr(lm, name, _refuse)


def _refuse(*_: object, **__: object) -> NoReturn:
    raise UserError(
        "this model runs packed and can't be saved: keep the directory it came from, or make a packed one of it with "
        "`roi-lightning pack`"
    )
