"""Recovery: the kept weights of a pruned model are trained on, and its zeros stay zero."""

from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_utils import PreTrainedModel
from typing_extensions import override

from roi_lightning.errors import UserError
from roi_lightning.export.sidecar import RECOVERED, read_sidecar
from roi_lightning.learning.base import MaskLearningModule
from roi_lightning.learning.student import PrunedTensor
from roi_lightning.masks.layer_patterns import DENSE, layer_patterns
from roi_lightning.masks.mask_set import MaskSet
from roi_lightning.masks.pattern import NMPattern
from roi_lightning.models.fingerprint import check_masks_fit
from roi_lightning.models.layers import ChosenLayers, prunable_layers, stored_weights
from roi_lightning.models.source import SIDECAR, resolve_model
from roi_lightning.models.stored_tensors import StoredTensors
from roi_lightning.utils.dtensor import local_tensor
from roi_lightning.utils.progress import progress


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
            revision=None if base or Path(recorded["spec"]).is_dir() else recorded["revision"],
            pattern="2:4" if is_mixed else self._sidecar["pattern"],
            patterns=self._recorded_patterns() if is_mixed else None,
            targets=("*",),
            ignore=(),
            **kwargs,
        )
        self.start_from = lm
        self._dtypes: dict[str, torch.dtype] = {}
        self._kept: dict[str, Tensor] = {}  # this rank's part of the masks, a bit per weight

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
        names = {stored: name for name, stored in stored_weights(self.source, lm, layers).items()}
        recorded = self._recorded_patterns()
        for tensor in recorded:
            shape = layers[names[tensor]].stored_shape if tensor in names else None
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
    def shapes(self, shape: tuple[int, ...], pattern: NMPattern) -> dict[str, tuple[int, ...]]:
        return {"kept": shape}

    @override
    def training_weight(self, tensor: PrunedTensor, **learned: Tensor) -> Tensor:
        return learned["kept"].to(tensor.teacher.dtype)

    @override
    def configure_model(self) -> None:
        if self.teacher is not None:
            return
        super().configure_model()
        if others := set(self._sidecar["updated"]).difference(self.stored_weights.values()):
            raise UserError(
                f"{self.start_from!r} has other trained tensors than masked weights, {min(others)!r} first, which "
                "recovery would put back to the dense model's; give an export without such"
            )
        stored = StoredTensors(self._export)
        masks = {name: self.masks.layers[x] for name, x in self.stored_weights.items()}
        for tensor in progress(list(self.tensors.values()), "reading kept weights"):
            weights = []
            for name, layer in tensor.layers.items():
                weight = stored[self.stored_weights[name]]
                self._dtypes[self.stored_weights[name]] = weight.dtype
                weights.append(weight.T if layer.transposed else weight)
            whole = torch.stack(weights).view(tensor.shape)
            tensor.here("kept").copy_(whole[tensor.rows])
            self._kept[tensor.name] = tensor.bits(masks)
            self._zero_pruned(tensor, tensor.here("kept"))

    def _zero_pruned(self, tensor: PrunedTensor, values: Tensor) -> None:
        """Set what belongs to pruned weights to zero, in this rank's part of a tensor."""
        kept = self._kept[tensor.name] = self._kept[tensor.name].to(values.device)  # once
        values.masked_fill_(~tensor.from_bits(kept), 0)

    @override
    def on_fit_start(self) -> None:
        super().on_fit_start()
        # The dense model is what distillation learns from, and what the export will name.
        check_masks_fit(self.base, self.masks)
        if not self.masks.updated:
            self.prior_masks = {name: self.masks.layers[x] for name, x in self.stored_weights.items()}

    # Stepping.

    @override
    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        for tensor in self.tensors.values():
            if (gradient := tensor.learned["kept"].grad) is not None:
                self._zero_pruned(tensor, local_tensor(gradient))
        super().on_before_optimizer_step(optimizer)

    @override
    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        for tensor in self.tensors.values():
            self._zero_pruned(tensor, tensor.here("kept"))

    @override
    def hard_mask(self, tensor: PrunedTensor) -> Tensor:
        stored = self.stored_weights
        return tensor.mask({name: self.masks.layers[stored[name]] for name in tensor.layers})

    @override
    def hard_weight(self, tensor: PrunedTensor) -> Tensor:
        return tensor.here("kept")

    # Export.

    @override
    def updates(self) -> dict[str, Tensor]:
        return self.as_stored(self.hard_weight, self._dtypes.__getitem__)

    @property
    @override
    def prior_name(self) -> str | None:
        return "mask only" if self.prior_masks else None

    @override
    def settings(self) -> dict[str, object]:
        started = {"export": self.start_from, "export_checksum": self._sidecar["checksum"]}
        return super().settings() | started
