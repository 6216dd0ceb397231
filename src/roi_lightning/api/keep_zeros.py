"""Keep a model's zeros through a training loop that knows nothing of masks."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from transformers.modeling_utils import PreTrainedModel

from roi_lightning.api.pruned_weight import MaskedLora, PrunedWeight
from roi_lightning.errors import UserError
from roi_lightning.export import write_export
from roi_lightning.export.sidecar import RECOVERED
from roi_lightning.masks.mask_set import MASK_FILE, MaskSet
from roi_lightning.models.base_tensors import BaseTensors, open_base, same
from roi_lightning.models.source import resolve_model
from roi_lightning.models.stored_tensors import tensor_sha256
from roi_lightning.models.weight_names import loaded_names, stored_names

_RECOVER: Final = "train it with `roi-lightning fit --config recover.yaml`"


class KeptZeros:
    """What `keep_zeros` has put on a model, as long as it is wanted; a context manager, too.

    `check` and `save` still work after `remove`.

    Attributes:
        masks: Of the model.
    """

    def __init__(self, lm: PreTrainedModel, masks: MaskSet, layers: Mapping[str, nn.Module]) -> None:
        self.masks, self._lm, self._layers = masks, lm, layers
        self._pruned = {name: PrunedWeight(layer) for name, layer in masks.layers.items()}
        self._hooks: list[Any] = []
        self._adapters: list[tuple[dict[str, Any], str]] = []

    def remove(self) -> None:
        """Leave the model alone from now on; adapters that are not merged yet are peft's own again."""
        for hook in self._hooks:
            hook.remove()
        for variants, adapter in self._adapters:
            variants.pop(adapter, None)
        self._hooks.clear()
        self._adapters.clear()

    def check(self) -> None:
        """Refuse a model that has lost a zero.

        Raises:
            UserError: Naming the first weight with one that isn't zero.
        """
        for name, layer in self._layers.items():
            weight = _whole(name, layer)
            if weight.shape != self.masks.layers[name].stored_shape or not self._pruned[name].holds(weight):
                raise UserError(
                    f"{name!r} has weights that its mask prunes and that are not zero; apply the masks first, train "
                    "and merge adapters before the handle is removed, and initialise them without touching weights "
                    "(PiSSA and OLoRA do)"
                )

    def save(self, out: Path | str, base: str | None = None, *, overwrite: bool = False) -> Path:
        """Write the model as an exported directory, which `roi-lightning verify` can prove.

        Every weight is written in the dtype that the dense model has on disk; the tokenizer and other files are the
        dense model's.

        Args:
            out: The directory to make.
            base: The dense model that the masks were made for, if it is no longer where they say.
            overwrite: Replace an earlier export at `out`.

        Returns:
            `out`, absolute.

        Raises:
            UserError: If a zero was lost, adapters are not merged, the dense model isn't found or has other shapes,
                or `out` can't be used.
        """
        self.check()
        dense = _dense(self.masks, base)
        changed = self._changed(dense)
        masks = replace(self.masks, updated={name: tensor_sha256(x) for name, x in changed.items()})
        facts = {"method": RECOVERED}
        return write_export(dense, masks, Path(out), updates=changed, training=facts, overwrite=overwrite)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()

    def _start(self) -> None:
        self.check()
        for name, owner in _adapted(self._lm, self._layers).items():
            self._mask_adapters(name, owner)
        for name, layer in self._layers.items():
            weight = _whole(name, layer)
            if weight.requires_grad:
                self._hooks.append(weight.register_hook(self._pruned[name].zeroed))
        self._hooks.append(register_optimizer_step_post_hook(self._after_step))

    def _mask_adapters(self, name: str, owner: Any) -> None:
        from peft.tuners.lora import Linear

        if type(owner) is not Linear:
            raise UserError(
                f"{name!r} has an adapter of type {type(owner).__name__!r}; of masked weights only LoRA of linear "
                "layers can be kept: use LoraConfig on an unquantised model"
            )
        variants: dict[str, Any] = owner.lora_variant
        for adapter in owner.lora_A:
            if adapter in variants:
                variant = type(variants[adapter]).__name__
                raise UserError(
                    f"adapter {adapter!r} of {name!r} is the LoRA variant {variant!r}; only plain LoRA can be kept: "
                    "leave use_dora and its like out, or remove the earlier handle"
                )
            variants[adapter] = MaskedLora(self._pruned[name])
            self._adapters.append((variants, adapter))

    @torch.no_grad()
    def _after_step(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        """Any optimizer's: noise, decay and states in 8 bits may move what has no gradient."""
        stepped = {id(weight) for group in optimizer.param_groups for weight in group["params"]}
        for name, layer in self._layers.items():
            if id(layer.weight) in stepped:
                self._pruned[name].zero_(_whole(name, layer))

    def _changed(self, dense: BaseTensors) -> dict[str, Tensor]:
        """What is not the masked dense model's, by name on disk."""
        if any(hasattr(module, "base_layer") for module in self._lm.modules()):
            raise UserError("the model has adapters beside its weights; call merge_and_unload first")
        changed, parameters = {}, dict(self._lm.named_parameters())
        for name, stored in stored_names(self._lm, parameters, dense.files).items():
            before, after = dense[stored], parameters[name].detach().cpu()
            if before.shape != after.shape:
                raise UserError(
                    f"{stored!r} is {list(after.shape)} here and {list(before.shape)} in the dense model "
                    f"{dense.source.spec!r}; train without resizing it, or give the dense model as base"
                )
            after = after.to(before.dtype).contiguous()
            if stored in self._pruned:
                before, after = (self._pruned[stored].zeroed(x) for x in (before, after))
            if stored in self.masks.updated or not same(before, after):
                changed[stored] = after
        return changed


def keep_zeros(lm: nn.Module, masks: MaskSet | Path | str | None = None) -> KeptZeros:
    """Keep the zeros of a pruned model, whatever loop trains it, until the handle is removed.

    Gradients of pruned weights are zero before anything sees them, so that norms to clip by, moments and scalers are
    those of the kept ones; and pruned weights are set to zero after every step of every optimizer that holds them.
    LoRA adapters of pruned weights compute W + mask * (scaling * B A), which is also what peft merges. Other weights
    and adapters of them are left to the loop.

    Args:
        lm: Pruned already: an exported directory as transformers loads it, a model after `apply`, or peft's model of
            either; what is to be trained chosen, adapters added.
        masks: A mask set, a mask file or an exported directory; left out, those of the directory or hub model that
            `lm` was loaded from.

    Returns:
        The handle, which is a context manager, too.

    Raises:
        UserError: If no masks are found, they belong to another model, a pruned weight is not zero, weights are
            sharded, or adapters of pruned weights are none that can be kept.
    """
    inner = _transformers_model(lm)
    found = _masks(inner, masks)
    handle = KeptZeros(inner, found, _masked_layers(inner, found))
    try:
        handle._start()
    except UserError:
        handle.remove()
        raise
    return handle


def _transformers_model(lm: Any) -> PreTrainedModel:
    inner = lm.get_base_model() if hasattr(lm, "get_base_model") else lm
    if not isinstance(inner, PreTrainedModel):
        raise UserError(
            f"keep_zeros was given a {type(lm).__name__}; give the transformers or peft model inside it"
        )
    return inner


def _masks(lm: PreTrainedModel, masks: MaskSet | Path | str | None) -> MaskSet:
    if isinstance(masks, MaskSet):
        return masks
    if masks is not None:
        return MaskSet.load(Path(masks))
    try:
        directory = resolve_model(lm.name_or_path or "", getattr(lm.config, "_commit_hash", None)).directory
        return MaskSet.load(directory / MASK_FILE)
    except UserError as error:
        raise UserError(
            f"this {type(lm).__name__} was loaded from {lm.name_or_path!r}, which has no mask file that can be read "
            f"({error}); give keep_zeros the masks"
        ) from error


def _masked_layers(lm: PreTrainedModel, masks: MaskSet) -> dict[str, nn.Module]:
    """The module that holds each masked weight, by the weight's name on disk."""
    # peft puts a layer with adapters in the place of the one that it keeps inside.
    modules = {name.replace(".base_layer", ""): module for name, module in lm.named_modules()}
    known = [
        f"{name}.weight" for name, x in modules.items() if isinstance(getattr(x, "weight", None), Tensor)
    ]
    try:
        names = loaded_names(lm, masks.layers, known)
    except UserError as error:
        raise UserError(
            f"masks of another model, or weights that this {type(lm).__name__} holds otherwise (experts in a stack, "
            f"copies in peft's modules_to_save): {error}; give the masks of this model, or {_RECOVER}"
        ) from error
    layers = {stored: modules[name.removesuffix(".weight")] for stored, name in names.items()}
    for stored, layer in layers.items():
        shape, wanted = tuple(_whole(stored, layer).shape), masks.layers[stored].stored_shape
        if shape != wanted:
            raise UserError(
                f"masks of another model: {stored!r} is {list(shape)} here and {list(wanted)} there; give the masks "
                "of this one, whose weights are not quantised"
            )
    return layers


def _adapted(lm: PreTrainedModel, layers: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """What peft has put in the place of layers, by the weight's name on disk."""
    owners = {id(x.base_layer): x for x in lm.modules() if hasattr(x, "base_layer")}
    return {name: owners[id(layer)] for name, layer in layers.items() if id(layer) in owners}


def _whole(name: str, layer: nn.Module) -> nn.Parameter:
    weight = layer.get_parameter("weight")
    if isinstance(weight, DTensor):
        raise UserError(
            f"{name!r} is sharded; keep_zeros keeps weights that a device holds in full: {_RECOVER}"
        )
    return weight


def _dense(masks: MaskSet, base: str | None) -> BaseTensors:
    """The model that masks were made for, or what stands in for it."""
    recorded = masks.base
    try:
        source = resolve_model(base or recorded.spec, None if base else recorded.revision)
    except UserError as error:
        raise _not_found(base or recorded.spec) from error
    if base is None and source.kind == "hub" and recorded.revision is None:
        raise _not_found(recorded.spec)
    return open_base(source, recorded.dtype)


def _not_found(spec: str) -> UserError:
    return UserError(
        f"the dense model {spec!r}, for which the masks were made, is not here; give its directory as base"
    )
