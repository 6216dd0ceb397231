"""What the card of a model says once it has a name that others know it by."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Measured:
    """Figures from the JSON of `evaluate`, as they stand there.

    Attributes:
        figures: Of the model, by task, or by task and metric (`arc_easy.acc`).
        dense: Of the model it is compared with, likewise; empty without one.
        settings: How they came about.
    """

    figures: Mapping[str, float | str]
    dense: Mapping[str, float | str]
    settings: Mapping[str, Any]


@dataclass(frozen=True)
class Publication:
    """What only the person who publishes knows, or has looked up.

    Attributes:
        name: The repository, `owner/name`.
        licence: The front matter's `license`, `license_name` and `license_link`.
        base: The base model's hub id; None if it has none.
        languages: Codes.
        datasets: Hub ids of the text that the mask was made with.
        measured: How good the model is.
        command: What made it.
        config: The configuration of that command, YAML.
    """

    name: str
    licence: Mapping[str, str]
    base: str | None = None
    languages: Sequence[str] = field(default_factory=tuple)
    datasets: Sequence[str] = field(default_factory=tuple)
    measured: Measured | None = None
    command: str | None = None
    config: str | None = None
