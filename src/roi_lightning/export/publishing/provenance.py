"""How a directory came about and how good it is: its run's configuration, hub data sets, metrics of `evaluate`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import yaml

from roi_lightning.errors import UserError
from roi_lightning.export.card_metadata import MeasuredQuality, public_name, public_values
from roi_lightning.masks.layer_patterns import Pattern, mixed_pattern
from roi_lightning.masks.pattern import NMPattern
from roi_lightning.models.stored_tensors import read_json

_CONFIG: Final = "config.yaml"


def read_config(directory: Path, description: Mapping[str, Any]) -> str | None:
    """The configuration of the run that exported a directory, without folders; it is next to the directory.

    Args:
        directory: The export.
        description: Its sidecar.

    Returns:
        YAML; None if no run of `fit` made the directory, or its configuration is not there.

    Raises:
        UserError: If what is there is another run's.
    """
    file = directory.absolute().parent / _CONFIG
    if "learner" not in description.get("training", {}) or not file.is_file():
        return None
    try:
        config = yaml.safe_load(file.read_text(encoding="utf-8"))
        model = config["model"]["init_args"]
        pattern = mixed_pattern(NMPattern(model["pattern"]), model.get("patterns") or {})
        same = model["lm"] == description["base"]["spec"] and _has_all(pattern, description["pattern"])
    except (yaml.YAMLError, KeyError, TypeError, OSError, UnicodeError, UserError) as error:
        raise UserError(f"{str(file)!r} is not what a run of fit leaves ({error!r}); move it away") from error
    if not same:
        raise UserError(
            f"{str(file)!r} is of another run: it has {model['lm']!r} at {model['pattern']}, and {str(directory)!r} "
            f"{description['base']['spec']!r} at {description['pattern']}; move it away"
        )
    text: str = yaml.safe_dump(public_values(config), sort_keys=False, allow_unicode=True)
    return text


def _has_all(pattern: Pattern, label: str) -> bool:
    """Whether a configuration's patterns are those that a directory has; of mixed ones some may match no layer."""
    return set(label.split(" + ")) <= set(str(pattern).split(" + "))


def hub_datasets(description: Mapping[str, Any]) -> list[str]:
    """The hub ids among the sources of text."""
    sources = description.get("training", {}).get("text", "").split(", ")
    return [name for name in sources if name.count("/") == 1 and public_name(name) == name]


def read_measured(file: Path, directory: Path, name: str | None) -> MeasuredQuality:
    """Find the metrics of a directory.

    Args:
        file: What `evaluate --json` wrote.
        directory: The export.
        name: What the directory was called there; None if by a path to it.

    Raises:
        UserError: If it is no such file, or has no metrics of the directory.
    """
    content = _content(file)
    models, settings = content["models"], content["settings"]
    wanted = _name(models, directory) if name is None else name
    if wanted not in models:
        what = f"{str(directory)!r}" if wanted is None else f"{wanted!r}"
        raise UserError(
            f"{str(file)!r} has no metrics of {what}, but of {', '.join(map(repr, models))}; say which of these "
            "it is with --evaluated_as"
        )
    dense = settings["dense"]
    metrics, others = _flat(models[wanted]), _flat(models.get(dense, {})) if dense != wanted else {}
    kept = {
        key: value for key, value in settings.items() if key not in ("dense", "tasks", "device", "harness")
    }
    # Some settings are by model.
    own = {key: value[wanted] if isinstance(value, dict) else value for key, value in kept.items()}
    return MeasuredQuality(metrics, others, public_values(own))


def _content(file: Path) -> dict[str, Any]:
    if not file.is_file():
        raise UserError(f"--evaluation {str(file)!r} is no file; give what `evaluate --json` wrote")
    content = read_json(file)
    models, settings = content.get("models"), content.get("settings")
    if not (isinstance(models, dict) and models and isinstance(settings, dict)):
        raise UserError(f"--evaluation {str(file)!r} has no models; give what `evaluate --json` wrote")
    if not {"dense", "text"} <= settings.keys():
        raise UserError(f"--evaluation {str(file)!r} does not say how it was measured; evaluate again")
    return content


def _name(models: Mapping[str, Any], directory: Path) -> str | None:
    same = (name for name in models if Path(name).expanduser().resolve() == directory.resolve())
    return next(same, None)


def _flat(metrics: Mapping[str, Any]) -> dict[str, float | str]:
    """Every value by task, or by task and metric; without the members of task groups."""
    flat: dict[str, float | str] = {}
    for task, value in metrics.items():
        parts = (
            {k: v for k, v in value.items() if k != "subtasks"} if isinstance(value, dict) else {"": value}
        )
        flat |= {f"{task}.{part}".removesuffix("."): number for part, number in parts.items()}
    return flat
