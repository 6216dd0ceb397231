"""The table that a run ends with, from its `summary.json`; imports no torch, so that a script shows it at once."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from roi_lightning.utils.tables import print_table

SUMMARY_HEAD: Final = ("mask", "perplexity", "÷ dense", "zeros, pruned layers", "zeros, model")


def summary_rows(summary: Mapping[str, Any]) -> list[list[str]]:
    """Make the rows of the table, one for each mask.

    Args:
        summary: The content of `summary.json`.
    """
    perplexity: Mapping[str, float] = summary["perplexity"]
    rows = []
    for name, value in perplexity.items():
        zeros = {"prunable": 0.0, "model": 0.0} if name == "dense" else summary["zeros"]
        ratio = f"{value / perplexity['dense']:.2f}"
        rows.append([name, f"{value:,.2f}", ratio, f"{zeros['prunable']:.1%}", f"{zeros['model']:.1%}"])
    return rows


def show_summary(path: Path) -> None:
    """Print the table of a `summary.json`, and where the results are."""
    summary = json.loads(path.read_text())
    pattern = summary["pattern"] + (", mixed patterns" if "mixed_patterns" in summary else "")
    title = f"held-out perplexity at {pattern}: {summary['steps']} steps, {summary['seconds']:.0f} s"
    print_table(SUMMARY_HEAD, summary_rows(summary), title)
    checkpoint = f"checkpoint {_from_here(Path(summary['export']))}\n" if summary["export"] else ""
    sys.stdout.write(f"metrics    {path}\n{checkpoint}")


def _from_here(path: Path) -> Path:
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
