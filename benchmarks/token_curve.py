"""Perplexity against tokens learned from, run by run, and what the fitted curves say of a larger budget.

    python -m benchmarks.token_curve benchmarks/results/token_curve_2of4.json --tokens 2.1e9 --figure F.png

The JSON file holds, for each text, the dense model's perplexity and `[tokens, perplexity]` of every run, each with
schedules of its own that end there. Fitted is the excess e = ln(perplexity ÷ dense) = c + a D^-b over the tokens D.
Points that are still falling do not tell where they end, at which floor c. So the closest curve of every floor from 0
on is found, and the answer is a range: of those that pass the points no farther off than seeds lie apart.
"""

import argparse
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from benchmarks.study.figure import tokens_label
from roi_lightning.reports.style import DASHED, INK, line_style, own_style, style_axes, titled_figure, to_png
from roi_lightning.utils.atomic_io import written_aside
from roi_lightning.utils.tables import markdown_table

# Tokens, and the excess ln(perplexity ÷ dense).
Points = Sequence[tuple[float, float]]
FLOORS: Final = 200
_NOTE: Final = (
    "Each point is a run whose schedules end there. Bands: the closest curves with a floor and without "
    "that pass the points within the scatter of seeds. Dashed: the dense model."
)


@dataclass(frozen=True)
class Fit:
    """A curve c + a D^-b.

    Attributes:
        floor: c.
        scale: ln a.
        exponent: b.
        error: Root mean square of what the points lie off it, in log perplexity.
    """

    floor: float
    scale: float
    exponent: float
    error: float

    def __call__(self, tokens: float) -> float:
        """The excess after so many tokens."""
        return self.floor + math.exp(self.scale - self.exponent * math.log(tokens))


def fit(points: Points, floor: float) -> Fit:
    """The straight line through ln(e - c) over ln D with the least squares.

    Args:
        points: At two token counts or more, all above the floor.
        floor: c.
    """
    tokens, excess = np.array(points).T
    slope, scale = np.polyfit(np.log(tokens), np.log(excess - floor), 1)
    found = Fit(floor, float(scale), float(-slope), 0.0)
    squares = [(found(x) - y) ** 2 for x, y in points]
    return Fit(floor, found.scale, found.exponent, statistics.fmean(squares) ** 0.5)


def fits(points: Points, noise: float) -> list[Fit]:
    """The curves that pass the points within the noise, by their floors; the closest one where none does.

    Args:
        points: At three token counts or more.
        noise: In log perplexity.
    """
    lowest = min(excess for _, excess in points)
    every = [fit(points, lowest * i / FLOORS) for i in range(FLOORS)]
    bound = max(noise, min(x.error for x in every))
    return [x for x in every if x.error <= bound]


def scatter(texts: Mapping[str, Points]) -> float:
    """The standard deviation of log perplexity between runs that differ in their seeds, over all texts.

    Raises:
        ValueError: If no token count has two runs.
    """
    squares, spare = 0.0, 0
    for points in texts.values():
        for tokens in {x for x, _ in points}:
            alike = [y for x, y in points if x == tokens]
            squares += len(alike) * statistics.pvariance(alike)
            spare += len(alike) - 1
    if not spare:
        raise ValueError("no two runs are of as many tokens, so nothing is known of the noise between seeds")
    return math.sqrt(squares / spare)


def excesses(texts: Mapping[str, Mapping[str, Any]]) -> dict[str, Points]:
    """By text, `[tokens, ln(perplexity ÷ dense)]` of every run."""
    return {
        name: [(tokens, math.log(perplexity / text["dense"])) for tokens, perplexity in text["runs"]]
        for name, text in texts.items()
    }


def as_markdown(texts: Mapping[str, Mapping[str, Any]], budgets: Sequence[float]) -> str:
    """A row for each text: means over seeds as times the dense perplexity, exponents, and ranges at the budgets."""
    points = excesses(texts)
    noise, counts = scatter(points), sorted({x for runs in points.values() for x, _ in runs})
    head = ["text", "dense", *map(tokens_label, counts), "exponent b", "floor e^c"]
    rows = []
    for name, runs in points.items():
        found = fits(runs, noise)
        means = [[y for x, y in runs if x == count] for count in counts]
        row = [name, f"{texts[name]['dense']:.2f}"]
        row += [f"{math.exp(statistics.fmean(values)):.2f}" if values else "" for values in means]
        row += [_range([x.exponent for x in found]), _range([math.exp(x.floor) for x in found])]
        rows.append(row + [_range([math.exp(x(budget)) for x in found]) for budget in budgets])
    return markdown_table([*head, *(f"at {tokens_label(x)}" for x in budgets)], rows) + "\n"


def _range(values: Sequence[float]) -> str:
    low, high = f"{min(values):.2f}", f"{max(values):.2f}"
    return low if low == high else f"{low} to {high}"


def draw(texts: Mapping[str, Mapping[str, Any]], budget: float, title: str, out: Path) -> None:
    """Write the PNG, a panel for each text, from the first run to the budget."""
    points = excesses(texts)
    noise = scatter(points)
    with own_style():
        figure = titled_figure(title, _NOTE, 2.7 * len(points) + 0.6, 2.7)
        panels = figure.subplots(1, len(points), squeeze=False, sharey=True)[0]
        for axes, (name, runs) in zip(panels, points.items(), strict=True):
            _panel(axes, runs, fits(runs, noise), budget)
            axes.set_title(name, size=10, color=INK, pad=6)
            style_axes(
                axes, "tokens learned from", "" if axes is not panels[0] else "perplexity, times dense"
            )
    with written_aside(out) as partial:
        partial.write_bytes(to_png(figure))


def _panel(axes: Axes, runs: Points, found: Sequence[Fit], budget: float) -> None:
    style = line_style(0, 1)
    across = np.geomspace(min(x for x, _ in runs), budget, 100)
    curves = np.exp([[curve(x) for x in across] for curve in found])
    axes.fill_between(across, curves.min(0), curves.max(0), color=style["color"], alpha=0.18, linewidth=0)
    axes.plot([x for x, _ in runs], [math.exp(y) for _, y in runs], **style | {"linestyle": ""})
    axes.axhline(1, **DASHED)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: tokens_label(x)))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 4, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def main(argv: Sequence[str] | None = None) -> None:
    """Read, print, draw."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", type=Path)
    parser.add_argument(
        "--tokens", type=float, nargs="+", default=[2.1e9], help="budgets (default: the paper's)"
    )
    parser.add_argument("--title", default="SmolLM2-135M-Instruct at 2:4")
    parser.add_argument("--figure", type=Path)
    args = parser.parse_args(argv)
    texts = json.loads(args.runs.read_text())["texts"]
    print(as_markdown(texts, args.tokens))
    if args.figure:
        draw(texts, max(args.tokens), args.title, args.figure)


if __name__ == "__main__":
    main()
