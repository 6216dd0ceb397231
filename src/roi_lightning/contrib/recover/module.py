"""Recovery: the kept weights of a pruned model are trained on, and its zeros stay zero."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import PreTrainedModel
from typing_extensions import override

from roi_lightning.errors import UserError
from roi_lightning.export.sidecar import RECOVERED, read_sidecar
from roi_lightning.learning.base import MaskLearningModule
from roi_lightning.masks.layer_mask import LayerMask, unpack_bits
from roi_lightning.masks.layer_patterns import DENSE, layer_patterns
from roi_lightning.masks.mask_set import MaskSet
from roi_lightning.masks.pattern import NMPattern
from roi_lightning.models.fingerprint import check_masks_fit
from roi_lightning.models.layers import ChosenLayers, LinearLayer, prunable_layers, stored_names
from roi_lightning.models.source import SIDECAR, resolve_model
from roi_lightning.models.stored_tensors import StoredTensors
from roi_lightning.samplers.masked_linear import LayerState, MaskedLinear, attach, in_mode
from roi_lightning.utils.dtensor import distribute_like, local_tensor
from roi_lightning.utils.progress import progress


class KeptLinear(MaskedLinear):
    """A layer whose kept weights are trained, in a float32 copy that is zero elsewhere.

    `weight` is the dense model's.

    Attributes:
        kept: The copy, [out, in].
        mask_bits: uint8 [out, ceil(in / 8)], as in `LayerMask.packed`; nothing is kept before `start`.
    """

    learned = ("kept",)
    kept: nn.Parameter
    mask_bits: Tensor

    def __init__(self, dense: LinearLayer, name: str, state: LayerState) -> None:
        super().__init__(dense, name, state)
        self.kept = nn.Parameter(torch.zeros_like(self.weight, dtype=torch.float32))
        rows, columns = self.weight.shape
        bits = torch.zeros((rows, -(-columns // 8)), dtype=torch.uint8, device=self.weight.device)
        self.register_buffer("mask_bits", bits, persistent=False)

    @override
    def drawn_weight(self) -> Tensor:
        return self.kept.to(self.weight.dtype)

    @override
    def hard_mask(self) -> Tensor:
        return unpack_bits(self.mask_bits, self.weight.shape[1])

    @override
    def own_weight(self) -> Tensor:
        return self.kept.detach()

    @torch.no_grad()
    def start(self, mask: LayerMask, stored: Tensor) -> None:
        """Set the mask and the weights to begin with.

        Args:
            mask: The layer's.
            stored: The masked weight as on disk.
        """
        self.mask_bits.copy_(mask.packed)
        rows = stored.t() if self.transposed else stored
        self.kept.copy_(distribute_like(rows.float().contiguous(), self.kept))

    def zero_pruned_(self, tensor: Tensor) -> None:
        """Set what belongs to pruned weights to zero, in place.

        Args:
            tensor: Shaped and sharded as `kept`.
        """
        mask = local_tensor(distribute_like(self.hard_mask(), self.kept.detach()))
        local_tensor(tensor).masked_fill_(~mask, 0)


class RecoveryModule(MaskLearningModule):
    """Trains the weights that a mask keeps, in float32; the mask, the zeros, embeddings and the head stay.

    The loss is that of `MaskLearningModule`: cross-entropy on the text, and with `distillation` the divergence from
    the dense model that the mask was made for. Gradients of pruned weights are zero before they are clipped, and
    pruned weights are zero after every step, whatever the optimizer.

    Args:
        lm: An exported directory, or a hub model that is one.
        base: The dense model it was made from, if that is no longer where the export says.
        kwargs: As in `MaskLearningModule`.

    Raises:
        UserError: If the directory is no export.
    """

    learns = "weights"
    layers: Mapping[str, KeptLinear]

    def __init__(self, lm: str, *, base: str | None = None, **kwargs: Any) -> None:
        source = resolve_model(lm)
        if source.kind == "gguf" or not (source.directory / SIDECAR).is_file():
            raise UserError(
                f"{lm!r} is no exported directory, and only the kept weights of one can be trained on; give what "
                "fit, prune, apply or export wrote"
            )
        self._export = source.directory
        self._sidecar = read_sidecar(self._export)
        recorded, is_mixed = self._sidecar["base"], "mixed_patterns" in self._sidecar
        super().__init__(
            base or recorded["spec"],
            revision=None if base else recorded["revision"],
            pattern="2:4" if is_mixed else self._sidecar["pattern"],
            patterns=self._recorded_patterns() if is_mixed else None,
            targets=("*",),
            ignore=(),
            **kwargs,
        )
        self.start_from = lm
        self.state = LayerState(self.pattern)
        self._dtypes: dict[str, torch.dtype] = {}

    @property
    @override
    def method(self) -> str:
        return RECOVERED

    @cached_property
    def masks(self) -> MaskSet:
        """Of the export.

        Raises:
            UserError: If the file is missing or not intact.
        """
        return MaskSet.load(self._export)

    # Building.

    @override
    def choose(self, lm: PreTrainedModel) -> ChosenLayers:
        tensors, layers = StoredTensors(self._export), prunable_layers(lm)
        stored = stored_names(lm, [f"{name}.weight" for name in layers], tensors)
        names = {stored[f"{name}.weight"]: name for name in layers}
        recorded = self._recorded_patterns()
        for tensor in recorded:
            shape = tuple(layers[names[tensor]].weight.shape) if tensor in names else None
            if shape != tensors.shape(tensor):
                raise UserError(
                    f"{str(self._export)!r} was not made from {self.source.spec!r}: {tensor!r} is "
                    f"{list(tensors.shape(tensor))} there and {shape and list(shape)} here; name the dense model "
                    "that it was made from (base)"
                )
        patterns = {names[x]: None if p == DENSE else NMPattern(p) for x, p in recorded.items()}
        own = {name: layer for name, layer in layers.items() if name in patterns}
        return ChosenLayers(
            {name: layer for name, layer in own.items() if patterns[name] is not None},
            {name: layer for name, layer in own.items() if patterns[name] is None},
            layer_patterns({name: patterns[name] for name in own}),
        )

    def _recorded_patterns(self) -> dict[str, str]:
        """N:M or `dense` by the name of a tensor on disk."""
        layers, whole = self._sidecar["layers"], self._sidecar["pattern"]
        dense = self._sidecar.get("mixed_patterns", {}).get("dense", {})
        own = {name: entry.get("pattern", whole) for name, entry in layers.items()}
        return own | dict.fromkeys(dense, DENSE)

    @override
    def attach(self, lm: PreTrainedModel, layers: dict[str, LinearLayer]) -> dict[str, KeptLinear]:
        self.state.pattern = self.pattern
        return attach(lm, layers, self.state, KeptLinear)

    @override
    def configure_model(self) -> None:
        if self.lm is not None:
            return
        super().configure_model()
        if others := set(self._sidecar["updated"]).difference(self.stored_weights.values()):
            raise UserError(
                f"{self.start_from!r} has other trained tensors than masked weights, {min(others)!r} first, which "
                "recovery would put back to the dense model's; give an export without such"
            )
        tensors = StoredTensors(self._export)
        for name, stored in progress(list(self.stored_weights.items()), "reading kept weights"):
            tensor, mask = tensors[stored], self.masks.layers[stored]
            self.layers[name].start(mask, tensor.masked_fill(~mask.to_bool(), 0))
            self._dtypes[name] = tensor.dtype

    @override
    def on_fit_start(self) -> None:
        super().on_fit_start()
        # The dense model is what distillation learns from, and what the export will name.
        check_masks_fit(self.base, self.masks)
        if not self.masks.updated:
            self.prior_masks = {name: self.masks.layers[x] for name, x in self.stored_weights.items()}

    # Stepping.

    @override
    def prepare_step(self, batch_idx: int) -> None:
        self.state.mode = "sample"

    @override
    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        for layer in self.layers.values():
            if layer.kept.grad is not None:
                layer.zero_pruned_(layer.kept.grad)
        super().on_before_optimizer_step(optimizer)

    @override
    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        for layer in self.layers.values():
            layer.zero_pruned_(layer.kept.detach())

    @override
    def under_masks(self, masks: Mapping[str, LayerMask] | None = None) -> AbstractContextManager[None]:
        """Run the model as it is trained so far; under given masks, the dense model under these."""
        return in_mode(self.state, "sample") if masks is None else super().under_masks(masks)

    # Export.

    @override
    def updates(self) -> dict[str, Tensor]:
        return {
            stored: self.layers[name].as_stored(self.layers[name].own_weight(), self._dtypes[name])
            for name, stored in self.stored_weights.items()
        }

    @property
    @override
    def prior_name(self) -> str | None:
        return "mask only" if self.prior_masks else None

    @override
    def settings(self) -> dict[str, object]:
        started = {"export": self.start_from, "export_checksum": self._sidecar["checksum"]}
        return super().settings() | started
