"""What a run learns with: kept in its checkpoints and exports, and compared when a checkpoint is resumed.

A recipe names every setting that the learned mask depends on by the option it comes from. What may change when a
run resumes is left out: ranks, micro-batches and their accumulation, loader workers, logging, and the number of
optimizer steps, which may grow.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any, Final, Protocol, runtime_checkable

from lightning.pytorch import LightningDataModule, Trainer
from torch.optim import Optimizer

from roi_lightning.errors import UserError
from roi_lightning.export.sidecar import plain

Recipe = dict[str, Any]
# How an optimizer or a sampler computes, not what.
_IMPLEMENTATION: Final = ("params", "fused", "foreach", "capturable", "differentiable", "compiled")
_NAMED: Final = 3
_TEXT: Final = "data."


@runtime_checkable
class HasRecipe(Protocol):
    """A part of a run that the learned mask depends on: the learner, the text, some callbacks."""

    def recipe(self) -> Mapping[str, object]:
        """Its settings by option, anything that JSON can spell."""


def run_recipe(learner: HasRecipe, trainer: Trainer, data: LightningDataModule | None) -> Recipe:
    """The settings that a run's mask depends on, by option; plain values.

    Args:
        learner: The learner.
        trainer: Its gradient clipping counts, and the callbacks that have a recipe.
        data: The text; counts if it has a recipe.
    """
    clip = {"trainer.gradient_clip_val": trainer.gradient_clip_val}
    text: Mapping[str, object] = data.recipe() if isinstance(data, HasRecipe) else {}
    settings = {**learner.recipe(), **clip, **callback_recipes(trainer), **text}
    return {name: plain(value) for name, value in settings.items()}


def callback_recipes(trainer: Trainer) -> dict[str, object]:
    """The settings of the callbacks that have a recipe."""
    found = (callback for callback in trainer.callbacks if isinstance(callback, HasRecipe))  # type: ignore[attr-defined]
    return {name: value for callback in found for name, value in callback.recipe().items()}


def without_text(recipe: Mapping[str, Any]) -> Recipe:
    """The part of a recipe that needs no text to be at hand."""
    return {name: value for name, value in recipe.items() if not name.startswith(_TEXT)}


def fingerprint(recipe: Mapping[str, Any]) -> str:
    """A short digest of a recipe, in hexadecimal."""
    return hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()[:16]


def options(name: str, value: object) -> dict[str, object]:
    """A setting by option: a plain value as it is, an object as its class and what that was made with.

    Args:
        name: The option, such as `model.tau`.
        value: A plain value, a schedule, a sampler, an optimizer.
    """
    if value is None or isinstance(value, str | int | float | list | tuple):
        return {name: value}
    made_with = value.param_groups[0] if isinstance(value, Optimizer) else vars(value)
    settings = {f"{name}.{key}": entry for key, entry in made_with.items() if key not in _IMPLEMENTATION}
    return {name: type(value).__name__, **settings}


def arguments(settings: Mapping[str, object]) -> dict[str, Any]:
    """What makes a learner once more, as plain values: its settings, except the optimizer."""
    found: dict[str, Any] = {}
    for name, value in settings.items():
        (_, first), *rest = options("", value).items()
        path = f"{type(value).__module__}.{type(value).__qualname__}"
        found[name] = {"class_path": path, "init_args": {k[1:]: x for k, x in rest}} if rest else first
    return {name: plain(value) for name, value in found.items() if name != "optimizer"}


def spelled(value: object) -> object:
    """A setting for people: a plain value as it is, an object as the call that makes it."""
    first, *rest = options("", value).items()
    if not rest:
        return first[1]
    return f"{first[1]}({', '.join(f'{key[1:]}={entry!r}' for key, entry in rest)})"


def check_same_run(here: Mapping[str, Any], there: Mapping[str, Any], where: str) -> None:
    """Refuse a checkpoint that was learned with other settings.

    Args:
        here: The recipe of this run.
        there: That of the checkpoint.
        where: The checkpoint.

    Raises:
        UserError: Naming what differs and the way to insist.
    """
    other = [name for name in sorted(here.keys() | there.keys()) if here.get(name) != there.get(name)]
    if other:
        more = f" and {len(other) - _NAMED} more" if len(other) > _NAMED else ""
        named = ", ".join(
            f"{name} is {there.get(name)} there and {here.get(name)} here" for name in other[:_NAMED]
        )
        raise UserError(
            f"checkpoint {where!r} is of another run: {named}{more}; resume with the settings of its run, or pass "
            "--allow_changed_settings if the change is meant"
        )
