"""The facts of a run: model, pattern, method, text, budget, machine, versions, command."""

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from roi_lightning.reports.endings import PROGRAM
from roi_lightning.reports.sources import Mask


def fact_rows(masks: Sequence[Mask]) -> list[tuple[str, list[str]]]:
    """The facts, a row each with a value per mask; rows that no mask has a value for are left out."""
    rows = [(label, [read(mask) for mask in masks]) for label, read in _FACTS]
    return [(label, values) for label, values in rows if any(values)]


def settings_rows(masks: Sequence[Mask]) -> list[tuple[str, list[str]]]:
    """Every recorded setting, a row each with a value per mask."""
    found = [mask.run.get("settings") or {} for mask in masks]
    names = dict.fromkeys(name for settings in found for name in settings)
    return [(name, [_setting(settings.get(name)) for settings in found]) for name in names]


def prior_of(mask: Mask) -> str:
    """The mask that learning started from; empty without one."""
    prior = mask.run.get("settings", {}).get("model.prior", mask.training.get("prior"))
    return "" if prior in (None, "none") else str(prior)


def tokens_of(mask: Mask) -> int:
    """Tokens of calibration text that were learned or measured on."""
    if mask.run.get("tokens_per_step"):
        return mask.last_step * int(mask.run["tokens_per_step"])
    return int(mask.training.get("tokens") or 0)


def seconds_of(mask: Mask) -> float:
    """Seconds that all legs took which have ended."""
    legs = mask.record.legs if mask.record else []
    recorded = [float(leg.end["seconds"]) for leg in legs if leg.end]
    return (
        sum(recorded) if recorded else float(mask.summary.get("seconds") or mask.training.get("seconds") or 0)
    )


def duration_of(mask: Mask) -> str:
    """The same in hours, minutes and seconds; empty if not known."""
    seconds = round(seconds_of(mask))
    hours, minutes = seconds // 3600, seconds // 60 % 60
    if not seconds:
        return ""
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {seconds % 60} s" if minutes else f"{seconds} s"


def machine_of(mask: Mask) -> Mapping[str, Any]:
    """The machine of the newest leg; empty if not known."""
    found: Mapping[str, Any] = mask.record.legs[-1].start["machine"] if mask.record else {}
    return found


def text_of(mask: Mask) -> str:
    """Where the calibration text is from."""
    corpora = mask.run.get("corpora") or mask.training.get("text") or ""
    return ", ".join(map(str, corpora)) if isinstance(corpora, list) else str(corpora)


def command_words(mask: Mask) -> str:
    """The command that made a mask, as it was typed; empty if it is not known."""
    words = _start(mask).get("command") or mask.sidecar.get("command") or ()
    return shlex.join([PROGRAM, *map(str, words)]) if words else ""


def _start(mask: Mask) -> Mapping[str, Any]:
    return mask.record.legs[-1].start if mask.record else {}


def _learner(mask: Mask) -> str:
    learner = str(mask.run.get("learner") or mask.training.get("learner") or "").rpartition(".")[2]
    return f"{mask.method} ({learner})" if learner else mask.method


def _weights(mask: Mask) -> str:
    layers, weights = mask.run.get("layers"), mask.run.get("masked_weights")
    if layers and weights:
        return f"{weights:,} weights in {layers:,} layers"
    return f"{len(mask.sidecar['layers']):,} layers" if mask.sidecar.get("layers") else ""


def _pattern(mask: Mask) -> str:
    if not mask.mixed:
        return "" if mask.pattern == "N:M" else mask.pattern
    kept, prunable = mask.mixed["kept"], mask.mixed["prunable"]
    return f"{mask.pattern}, mixed patterns: {kept:,} of {prunable:,} prunable weights kept, {kept / prunable:.1%}"


def _zeros(mask: Mask) -> str:
    fraction = mask.summary.get("zeros", {}).get("model", mask.sidecar.get("zero_fraction"))
    return f"{100 * fraction:.1f} % of all parameters" if fraction is not None else ""


def _window(mask: Mask) -> str:
    length = mask.run.get("seq_len") or mask.training.get("seq_len")
    windows = mask.run.get("windows_per_step") or mask.training.get("windows")
    unit = " a step" if mask.run.get("windows_per_step") else ""
    return f"{windows:,}{unit}, {length:,} tokens each" if length and windows else ""


def _machine_words(mask: Mask) -> str:
    found = machine_of(mask)
    memory = f"{found['memory_gib']:.0f} GiB of memory" if found.get("memory_gib") else ""
    cores = f"{found['cores']} cores" if found.get("cores") else ""
    parts = [found.get("device"), found.get("cpu"), cores, memory, found.get("os")]
    return ", ".join(str(part) for part in dict.fromkeys(parts) if part)


def _versions(mask: Mask) -> str:
    found = _start(mask).get("versions") or {}
    own = mask.sidecar.get("package_version")
    return ", ".join(f"{name} {number}" for name, number in found.items()) or (
        f"roi_lightning {own}" if own else ""
    )


def _ended(mask: Mask) -> str:
    count = len(mask.record.legs) if mask.record else 0
    return f"{mask.status}, in {count} legs" if count > 1 else mask.status if count else ""


def _steps_of(mask: Mask) -> str:
    wanted = _start(mask).get("max_steps")
    return f"{mask.last_step:,} of {wanted:,}" if wanted else f"{mask.last_step:,}" if mask.last_step else ""


def _setting(value: object) -> str:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, list | dict) else _number(value)


def _number(value: object) -> str:
    return "" if value is None else str(value)


_FACTS: Final[tuple[tuple[str, Callable[[Mask], str]], ...]] = (
    ("folder", lambda mask: str(mask.path)),
    ("ended", _ended),
    ("model", lambda mask: "" if mask.model == "a model" else mask.model),
    ("pattern", _pattern),
    ("method", _learner),
    ("prior", prior_of),
    ("masked", _weights),
    ("zeros", _zeros),
    ("text", text_of),
    ("windows", _window),
    ("optimizer steps", _steps_of),
    ("tokens", lambda mask: f"{tokens_of(mask):,}" if tokens_of(mask) else ""),
    ("time", duration_of),
    ("started", lambda mask: str(mask.record.legs[0].start["time"]) if mask.record else ""),
    ("machine", _machine_words),
    ("versions", _versions),
    ("seed", lambda mask: _number(_start(mask).get("seed", mask.training.get("seed")))),
    ("commit", lambda mask: _number(_start(mask).get("commit"))),
    ("command", command_words),
)
