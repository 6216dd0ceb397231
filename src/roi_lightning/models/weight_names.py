"""Map parameter names to the names of the same tensors on disk, and back.

transformers renames tensors while it loads them; its own rules say how.
"""

from collections.abc import Collection, Iterable

from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming
from transformers.modeling_utils import PreTrainedModel

from roi_lightning.errors import UserError
from roi_lightning.models.source import ModelSource
from roi_lightning.models.stored_tensors import StoredTensors


def stored_names(lm: PreTrainedModel, names: Iterable[str], stored: Iterable[str]) -> dict[str, str]:
    """Map parameter names of a loaded model to the names of the same tensors on disk.

    Args:
        lm: The model, its experts split.
        names: Of parameters.
        stored: Of all tensors on disk.

    Raises:
        UserError: If a parameter is on disk under no known name.
    """
    keys = {loaded: key for key, loaded in _renamed(lm, stored).items()}
    return {name: keys[_among(keys, name, lm, "stored tensors")] for name in names}


def loaded_names(lm: PreTrainedModel, stored: Iterable[str], names: Iterable[str]) -> dict[str, str]:
    """Map names of tensors on disk to those of the parameters they become.

    Args:
        lm: The model, its experts split.
        stored: Names on disk.
        names: Of all parameters.

    Raises:
        UserError: If the model has no such parameter.
    """
    known = set(names)
    return {key: _among(known, name, lm, "parameters") for key, name in _renamed(lm, stored).items()}


def _renamed(lm: PreTrainedModel, stored: Iterable[str]) -> dict[str, str]:
    """Names on disk → names as loading renames them; what it stacks afterwards keeps a name of its own."""
    renamings = [rule for rule in get_model_conversion_mapping(lm) if isinstance(rule, WeightRenaming)]
    renamed = {}
    for key in sorted(stored):
        name = key
        for rule in renamings:
            name, _ = rule.rename_source_key(name)
        renamed[key] = name
    return renamed


def _among(known: Collection[str], name: str, lm: PreTrainedModel, what: str) -> str:
    # Some checkpoints (GPT-2's) leave out the prefix of the inner model, others keep it.
    prefix = f"{lm.base_model_prefix}."
    for option in (name, name.removeprefix(prefix), prefix + name):
        if option in known:
            return option
    raise UserError(f"{name!r} is not among the model's {len(known)} {what}; leave its layer out (ignore)")


def stored_weights(source: ModelSource, lm: PreTrainedModel, layers: Iterable[str]) -> dict[str, str]:
    """Layer name → the name of its weight as stored on disk; of a model without safetensors, as in memory.

    Raises:
        UserError: If a weight is on disk under no known name.
    """
    names = {layer: f"{layer}.weight" for layer in layers}
    if not source.is_stored:
        return names
    stored = stored_names(lm, names.values(), StoredTensors(source.directory))
    return {layer: stored[name] for layer, name in names.items()}
