"""Keep a model's zeros through a training loop that knows nothing of masks."""

from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from transformers.modeling_utils import PreTrainedModel

from roi_lightning.errors import UserError
from roi_lightning.export import write_export
from roi_lightning.export.sidecar import RECOVERED
from roi_lightning.masks.layer_mask import unpack_bits
from roi_lightning.masks.mask_set import MaskSet
from roi_lightning.models.base_tensors import BaseTensors, open_base, same
from roi_lightning.models.layers import Layer, block_layers, loaded_names, named_weights, stored_names
from roi_lightning.models.source import resolve_model
from roi_lightning.models.stored_tensors import tensor_sha256


class KeptZeros(AbstractContextManager["KeptZeros"]):
    """Puts zeros back after every optimizer step; `check` and `save` still work after `remove`."""

    def __init__(self, lm: PreTrainedModel, masks: MaskSet) -> None:
        self._lm, self._masks = lm, masks
        own = dict(lm.named_parameters())
        known = {f"{name}.weight": x for name, x in block_layers(lm).items() if x.parameter in own}
        # By parameter: a stack of experts holds several.
        self._layers: dict[str, dict[str, Layer]] = {}
        for stored, name in loaded_names(lm, masks.layers, known).items():
            self._layers.setdefault(known[name].parameter, {})[stored] = known[name]
        self._weights = {name: own[name] for name in self._layers}
        self._bits = {
            stored: masks.layers[stored].packed.to(own[name].device)
            for name, layers in self._layers.items()
            for stored in layers
        }
        self.check()
        self._hooks = [register_optimizer_step_post_hook(self._after_step)]
        for name, weight in self._weights.items():
            trained = weight.requires_grad  # or later on, but torch hooks on to no other
            weight.requires_grad_()
            self._hooks.append(weight.register_hook(lambda x, n=name: self._write_zeros(n, x.clone())))
            weight.requires_grad_(trained)

    def remove(self) -> None:
        """Leave the model alone from now on."""
        for hook in self._hooks:
            hook.remove()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.remove()
        if kind is None:
            self.check()

    def check(self) -> None:
        """Raise a `UserError` that names the first weight that has lost a zero, or is no longer the model's."""
        for name, weight in self._current().items():
            for stored, layer in self._layers[name].items():
                rows, pruned = layer.view(weight.detach()), self._pruned(stored, weight.device)
                if rows.shape != pruned.shape or rows[pruned].any():
                    raise UserError(f"{stored!r} is not zero where its mask prunes it; apply the masks first")

    def save(self, out: Path | str, base: str | None = None, *, overwrite: bool = False) -> Path:
        """Write the model as an exported directory, in the dense model's dtypes, verify it, and return its path.

        Args:
            out: The directory to make.
            base: The dense model that the masks were made for, if it is no longer where they say.
            overwrite: Replace an earlier export at `out`.

        Raises:
            UserError: If a zero was lost, the dense model isn't found or has other shapes, or `out` can't be used.
        """
        self.check()
        spec, revision = (base, None) if base else (self._masks.base.spec, self._masks.base.revision)
        dense = open_base(resolve_model(spec, commit=revision), self._masks.base.dtype)
        changed = self._changed(dense)
        masks = replace(self._masks, updated={name: tensor_sha256(x) for name, x in changed.items()})
        facts = {"method": RECOVERED}
        return write_export(dense, masks, Path(out), updates=changed, training=facts, overwrite=overwrite)

    def _changed(self, dense: BaseTensors) -> dict[str, Tensor]:
        """What is not the masked dense model's, by name on disk."""
        changed, weights = {}, named_weights(self._lm)
        for name, stored in stored_names(self._lm, weights, dense.files).items():
            before = dense[stored]
            after = weights[name].cpu().to(before.dtype).contiguous()
            if stored in self._masks.layers:
                pruned = ~self._masks.layers[stored].to_bool()
                before, after = before.masked_fill(pruned, 0), after.masked_fill(pruned, 0)
            if stored in self._masks.updated or not same(before, after):
                changed[stored] = after
        return changed

    @torch.no_grad()
    def _after_step(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        """Undo what moves a weight without a gradient: noise, states in 8 bits."""
        for name, weight in self._current().items():
            if weight.requires_grad:
                self._write_zeros(name, weight)

    def _current(self) -> dict[str, nn.Parameter]:
        """The masked parameters; another one in the place of one would fill its zeros unseen."""
        parameters = dict(self._lm.named_parameters())
        for name, weight in self._weights.items():
            if parameters.get(name) is not weight:
                raise UserError(f"{name!r} was replaced; call keep_zeros after that, and wrap no layer")
        return self._weights

    def _write_zeros(self, name: str, tensor: Tensor) -> Tensor:
        """Set to zero what is pruned of a parameter, or of a tensor like it, in place."""
        for stored, layer in self._layers[name].items():
            layer.view(tensor).masked_fill_(self._pruned(stored, tensor.device), 0)
        return tensor

    def _pruned(self, stored: str, device: torch.device) -> Tensor:
        """What a mask prunes, boolean [out, in]."""
        return ~unpack_bits(self._bits[stored].to(device), self._masks.layers[stored].shape[1])


def keep_zeros(lm: PreTrainedModel, masks: MaskSet | Path | str | None = None) -> KeptZeros:
    """Keep the zeros of a pruned model, whatever loop trains it, until the handle is removed.

    Gradients of pruned weights are zero, too, so that norms to clip by and moments are those of the kept ones.

    Args:
        lm: Pruned already: an exported directory as transformers loads it, or a model after `apply`.
        masks: A mask set, a mask file or an exported directory; those of what `lm` was loaded from if left out.

    Raises:
        UserError: If no masks are found, they belong to another model, or a pruned weight is not zero.
    """
    if masks is None:
        name, commit = lm.name_or_path or "", getattr(lm.config, "_commit_hash", None)
        try:
            masks = resolve_model(name, commit=commit).directory
        except UserError as error:
            raise UserError(f"{error}, or give keep_zeros the masks") from error
    return KeptZeros(lm, masks if isinstance(masks, MaskSet) else MaskSet.load(Path(masks)))
