"""What a run's record says: the times of its steps, and its held-out perplexities (see `record`)."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def step_times(path: Path, skip: int = 0) -> list[float]:
    """Seconds of single steps, each from the end of the one before it or of a validation between them.

    Args:
        path: A record.
        skip: So many first steps of the run don't count.
    """
    times, last, since = [], -1, 0.0
    for line in _lines(path):
        if line.get("step") == last + 1 > skip:
            times.append(line["time"] - since)
        last, since = line.get("step", last), line["time"]
    return times


def curve(path: Path) -> dict[int, float]:
    """Held-out perplexity by optimizer step; where a resumed run measured one again, the later value."""
    found = {line["validated"]: line["perplexity"] for line in _lines(path) if "validated" in line}
    return dict(sorted(found.items()))


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    return map(json.loads, path.read_text().splitlines())
