"""Keep a model's zeros through a training loop that knows nothing of masks."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from transformers.modeling_utils import PreTrainedModel

from roi_lightning.errors import UserError
from roi_lightning.masks.layer_mask import unpack_bits
from roi_lightning.masks.mask_set import MASK_FILE, MaskSet
from roi_lightning.models.weight_names import loaded_names
from roi_lightning.utils.dtensor import distribute_like, local_tensor


class KeptZeros:
    """What `keep_zeros` has put on a model, as long as it is wanted; a context manager, too.

    Args:
        pruned: The masked weights by name, and for each the packed mask on its device and whether it is transposed.
    """

    def __init__(self, pruned: Mapping[str, tuple[nn.Parameter, Tensor, bool]]) -> None:
        self._pruned = {id(weight): (weight, bits, turned) for weight, bits, turned in pruned.values()}
        self._hooks: list[Any] = [
            weight.register_hook(partial(_without_pruned, bits, turned))
            for weight, bits, turned in pruned.values()
            if weight.requires_grad
        ]
        self._hooks.append(register_optimizer_step_post_hook(self._after_step))

    def remove(self) -> None:
        """Leave the model alone from now on."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()

    @torch.no_grad()
    def _after_step(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        """Any optimizer's: noise, decay and states in 8 bits may move what has no gradient."""
        for group in optimizer.param_groups:
            for weight in group["params"]:
                if id(weight) in self._pruned:
                    _, bits, turned = self._pruned[id(weight)]
                    pruned = distribute_like(_pruned(bits, turned, weight.shape), weight)
                    local_tensor(weight).masked_fill_(local_tensor(pruned), 0)


def keep_zeros(lm: PreTrainedModel, masks: MaskSet | Path | str | None = None) -> KeptZeros:
    """Keep the zeros of a pruned model, whatever loop trains it, until the handle is removed.

    Gradients of pruned weights are zero before anything sees them, so that norms to clip by, moments and scalers are
    those of the kept ones; and pruned weights are set to zero after every step of every optimizer that holds them.

    Args:
        lm: Pruned already: an exported directory as transformers loads it, or a model after `apply`. Other weights,
            adapters among them, are left to the loop.
        masks: A mask set, a mask file or an exported directory; left out, those of the directory that the model was
            loaded from.

    Returns:
        The handle, which is a context manager, too.

    Raises:
        UserError: If no masks are found, they belong to another model, or a pruned weight is not zero.
    """
    found = _masks(lm, masks)
    parameters = dict(lm.named_parameters())
    names = loaded_names(lm, found.layers, parameters)
    pruned = {}
    for stored, layer in found.layers.items():
        weight = parameters[names[stored]]
        if tuple(weight.shape) != layer.stored_shape:
            raise UserError(
                f"masks of another model: {stored!r} is {list(weight.shape)} here and {list(layer.stored_shape)} "
                "there; give the masks of this one"
            )
        bits = layer.packed.to(weight.device)
        if weight.detach()[_pruned(bits, layer.transposed, weight.shape)].any():
            raise UserError(
                f"{stored!r} has weights that its mask prunes and that are not zero; apply the masks first"
            )
        pruned[stored] = (weight, bits, layer.transposed)
    return KeptZeros(pruned)


def _masks(lm: PreTrainedModel, masks: MaskSet | Path | str | None) -> MaskSet:
    if isinstance(masks, MaskSet):
        return masks
    directory = Path(lm.name_or_path if masks is None else masks)
    if masks is None and not (directory / MASK_FILE).is_file():
        raise UserError(
            f"this {type(lm).__name__} was loaded from {lm.name_or_path!r}, which has no {MASK_FILE}; give "
            "keep_zeros the mask file"
        )
    return MaskSet.load(directory)


def _pruned(bits: Tensor, transposed: bool, shape: torch.Size) -> Tensor:
    """Where the weight is pruned, in its own orientation."""
    rows = ~unpack_bits(bits, shape[0] if transposed else shape[1])
    return rows.t() if transposed else rows


def _without_pruned(bits: Tensor, transposed: bool, gradient: Tensor) -> Tensor:
    return gradient.masked_fill(_pruned(bits, transposed, gradient.shape), 0)
