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
from roi_lightning.models.layers import loaded_names, stored_names
from roi_lightning.models.source import resolve_model
from roi_lightning.models.stored_tensors import tensor_sha256


class KeptZeros(AbstractContextManager["KeptZeros"]):
    """Puts zeros back after every optimizer step; `check` and `save` still work after `remove`."""

    def __init__(self, lm: PreTrainedModel, masks: MaskSet) -> None:
        self._lm, self._masks = lm, masks
        self._names = loaded_names(lm, masks.layers, dict(lm.named_parameters()))
        self._weights = {stored: lm.get_parameter(name) for stored, name in self._names.items()}
        self._bits = {stored: masks.layers[stored].packed.to(x.device) for stored, x in self._weights.items()}
        self.check()
        trained = {stored: weight for stored, weight in self._weights.items() if weight.requires_grad}
        self._hooks = [x.register_hook(lambda grad, n=n: self._zeroed(n, grad)) for n, x in trained.items()]
        self._hooks.append(register_optimizer_step_post_hook(self._after_step))

    def remove(self) -> None:
        """Leave the model alone from now on."""
        for hook in self._hooks:
            hook.remove()

    def __exit__(self, *_: object) -> None:
        self.remove()

    def check(self) -> None:
        """Raise a `UserError` that names the first weight that has lost a zero, or is no longer the model's."""
        for stored, weight in self._current().items():
            shape = self._masks.layers[stored].stored_shape
            if weight.shape != shape or not torch.equal(weight, self._zeroed(stored, weight)):
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
        dense = open_base(resolve_model(spec, revision), self._masks.base.dtype)
        changed = self._changed(dense)
        masks = replace(self._masks, updated={name: tensor_sha256(x) for name, x in changed.items()})
        facts = {"method": RECOVERED}
        return write_export(dense, masks, Path(out), updates=changed, training=facts, overwrite=overwrite)

    def _changed(self, dense: BaseTensors) -> dict[str, Tensor]:
        """What is not the masked dense model's, by name on disk."""
        changed, parameters = {}, dict(self._lm.named_parameters())
        for name, stored in stored_names(self._lm, parameters, dense.files).items():
            before = dense[stored]
            after = parameters[name].detach().cpu().to(before.dtype).contiguous()
            if stored in self._bits:
                before, after = self._zeroed(stored, before), self._zeroed(stored, after)
            if stored in self._masks.updated or not same(before, after):
                changed[stored] = after
        return changed

    @torch.no_grad()
    def _after_step(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        """Undo what moves a weight without a gradient: noise, states in 8 bits."""
        for stored, weight in self._current().items():
            if weight.requires_grad:
                weight.copy_(self._zeroed(stored, weight))

    def _current(self) -> dict[str, nn.Parameter]:
        """The masked weights; another parameter in the place of one would fill its zeros unseen."""
        parameters = dict(self._lm.named_parameters())
        for stored, name in self._names.items():
            if parameters.get(name) is not self._weights[stored]:
                raise UserError(f"{name!r} was replaced; call keep_zeros on the model as it is trained")
        return self._weights

    def _zeroed(self, stored: str, tensor: Tensor) -> Tensor:
        layer = self._masks.layers[stored]
        pruned = ~unpack_bits(self._bits[stored].to(tensor.device), layer.shape[1])
        return tensor.masked_fill(pruned.t() if layer.transposed else pruned, 0)


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
        masks = resolve_model(lm.name_or_path or "", getattr(lm.config, "_commit_hash", None)).directory
    return KeptZeros(lm, masks if isinstance(masks, MaskSet) else MaskSet.load(Path(masks)))
