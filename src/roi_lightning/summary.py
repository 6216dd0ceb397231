"""The table that a run ends with, from its `summary.json`."""

import json
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from rich.table import Table


def show_summary(path: Path) -> None:
    """Print the table of a `summary.json`, and where everything lies."""
    summary = json.loads(path.read_text())
    perplexity: Mapping[str, float] = summary["perplexity"]
    title = (
        f"held-out perplexity at {summary['pattern']}: {summary['steps']} steps, {summary['seconds']:.0f} s"
    )
    table = Table(title=title)
    for heading in ("mask", "perplexity", "÷ dense", "zeros, pruned layers", "zeros, model"):
        table.add_column(heading, justify="left" if heading == "mask" else "right")
    for name, value in perplexity.items():
        zeros = {"prunable": 0.0, "model": 0.0} if name == "dense" else summary["zeros"]
        ratio = f"{value / perplexity['dense']:.2f}"
        table.add_row(name, f"{value:,.2f}", ratio, f"{zeros['prunable']:.1%}", f"{zeros['model']:.1%}")
    console = Console()
    console.print(table)
    console.print(f"figures    {path}")
    if summary["export"]:
        console.print(f"checkpoint {summary['export']}")
