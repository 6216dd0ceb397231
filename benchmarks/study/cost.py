"""What a step of every method costs: time and memory, and nothing else measured."""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, Final

from benchmarks.study.table import one
from roi_lightning.utils.tables import markdown_table

BASELINE: Final = "roi"


def cost_rows(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A row per pattern and method, over its repeated runs.

    Args:
        runs: What `run_cost` returned.
    """
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for run in runs:
        groups.setdefault((run["pattern"], run["method"]), []).append(run)
    rows = {key: _row(*key, group) for key, group in groups.items()}
    for (pattern, _), row in rows.items():
        base = rows.get((pattern, BASELINE))
        for key in ("seconds_per_step", "peak_rss_bytes"):
            row[f"{key}_ratio"] = row[key] / base[key] if base else None
    return list(rows.values())


def _row(pattern: str, method: str, runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {
        "pattern": pattern,
        "method": method,
        "runs": len(runs),
        "seconds_per_step": median(x for run in runs for x in run["step_seconds"]),
        "seconds_per_step_by_run": [median(run["step_seconds"]) for run in runs],
        "peak_rss_bytes": max(run["peak_rss_bytes"] for run in runs),
    }


def cost_markdown(rows: Sequence[Mapping[str, Any]], notes: Sequence[str]) -> str:
    """The table, and the notes below it."""
    ratio = f"÷ {BASELINE}'s"
    head = ["pattern", "method", "s per step", "of each run", ratio, "min per 1,000 steps", "peak GiB", ratio]
    cells = [
        [
            row["pattern"],
            row["method"],
            f"{row['seconds_per_step']:.2f}",
            ", ".join(f"{x:.2f}" for x in row["seconds_per_step_by_run"]),
            one(row["seconds_per_step_ratio"], "{:.2f}"),
            f"{1000 * row['seconds_per_step'] / 60:,.1f}",
            f"{row['peak_rss_bytes'] / 2**30:.2f}",
            one(row["peak_rss_bytes_ratio"], "{:.2f}"),
        ]
        for row in rows
    ]
    return markdown_table(head, cells, left=2) + "\n" + "".join(f"\n- {note}" for note in notes)
