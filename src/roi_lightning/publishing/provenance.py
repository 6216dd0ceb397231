"""How a directory came about: the command, its configuration, the hub data sets it read."""

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import yaml

from roi_lightning.errors import UserError
from roi_lightning.export.public_names import public_name, public_values
from roi_lightning.oneshot import METHODS
from roi_lightning.pattern import NMPattern

_CONFIG: Final = "config.yaml"
_FIT: Final = f"python -m roi_lightning fit --config {_CONFIG}"
# Facts of `prune` that are options by the same name.
_OPTIONS: Final = ("damping", "block_size", "activations", "windows", "seq_len", "seed")


def read_config(directory: Path, description: Mapping[str, Any]) -> str | None:
    """The configuration of the run that exported a directory, without folders; it lies beside the directory.

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
        same = (model["lm"], NMPattern(model["pattern"])) == _made_of(description)
    except (yaml.YAMLError, KeyError, TypeError, OSError, UnicodeError, UserError) as error:
        raise UserError(f"{str(file)!r} is not what a run of fit leaves ({error!r}); move it away") from error
    if not same:
        raise UserError(
            f"{str(file)!r} is of another run: it has {model['lm']!r} at {model['pattern']}, and {str(directory)!r} "
            f"{description['base']['spec']!r} at {description['pattern']}; move it away"
        )
    text: str = yaml.safe_dump(public_values(config), sort_keys=False, allow_unicode=True)
    return text


def _made_of(description: Mapping[str, Any]) -> tuple[str, NMPattern]:
    return description["base"]["spec"], NMPattern(description["pattern"])


def command_of(description: Mapping[str, Any], has_config: bool) -> str | None:
    """The command line that made a directory, without folders; None if what is recorded does not tell.

    Args:
        description: Its sidecar.
        has_config: Whether the configuration is known.
    """
    training = description.get("training", {})
    if "learner" in training:
        return _FIT if has_config else None
    if training.get("method") not in METHODS:
        return None
    words = ["prune", description["base"]["spec"], "--method", training["method"]]
    words += ["--pattern", description["pattern"]]
    for name in ("targets", "ignore"):
        words += [f"--{name}", *training[name].split()] if name in training else []
    words += ["--data", *training["text"].split(", ")] if "text" in training else []
    for name in _OPTIONS:
        words += [f"--{name}", str(training[name])] if name in training else []
    words += ["--mask_only"] if training.get("update_weights") is False else []
    return f"python -m roi_lightning {shlex.join(map(public_name, [*words, '--out', 'DIR']))}"


def hub_datasets(description: Mapping[str, Any]) -> list[str]:
    """The hub ids among the sources of text."""
    sources = description.get("training", {}).get("text", "").split(", ")
    return [name for name in sources if name.count("/") == 1 and public_name(name) == name]
