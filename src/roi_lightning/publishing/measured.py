"""The figures of a directory in the JSON of `evaluate`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from roi_lightning.errors import UserError
from roi_lightning.export.public_names import public_values
from roi_lightning.export.publication import Measured
from roi_lightning.sources import read_json


def read_measured(file: Path, directory: Path, name: str | None) -> Measured:
    """Find the figures of a directory.

    Args:
        file: What `evaluate --json` wrote.
        directory: The export.
        name: What the directory was called there; None if by a path to it.

    Raises:
        UserError: If it is no such file, or has no figures of the directory.
    """
    content = _content(file)
    models, settings = content["models"], content["settings"]
    wanted = _name(models, directory) if name is None else name
    if wanted not in models:
        what = f"{str(directory)!r}" if wanted is None else f"{wanted!r}"
        raise UserError(
            f"{str(file)!r} has no figures of {what}, but of {', '.join(map(repr, models))}; say which of these "
            "it is with --evaluated_as"
        )
    dense = settings["dense"]
    figures, others = _flat(models[wanted]), _flat(models.get(dense, {})) if dense != wanted else {}
    kept = {key: value for key, value in settings.items() if key not in ("dense", "tasks", "device")}
    # Some are the models' own, by model.
    told = {key: value[wanted] if isinstance(value, dict) else value for key, value in kept.items()}
    return Measured(figures, others, public_values(told))


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


def _flat(figures: Mapping[str, Any]) -> dict[str, float | str]:
    """Every number by task, or by task and what it is of the task."""
    flat: dict[str, float | str] = {}
    for task, value in figures.items():
        parts = value if isinstance(value, dict) else {"": value}
        flat |= {f"{task}.{part}".removesuffix("."): number for part, number in parts.items()}
    return flat
