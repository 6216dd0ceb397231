"""Draws the charts of README and results.md: the methods' bars and the learners' curves.

python docs/draw_figures.py

The bars are of the table in `results.md`, the curves of what the study recorded, so that a figure is typed once.
"""

import json
import re
from pathlib import Path
from typing import Final

from matplotlib import pyplot

DOCS: Final = Path(__file__).resolve().parent
IMAGES: Final = DOCS / "images"
MODEL: Final = "SmolLM2-135M-Instruct (GGUF, Q4_1)"
# Rows of results.md's first table, and the labels of their bars.
ROWS: Final = {
    "dense": "dense model",
    "magnitude": "magnitude",
    "Wanda": "Wanda",
    "SparseGPT": "SparseGPT",
    "RoI, 150 steps": "RoI, 150 steps",
    "SparseGPT, 900 steps of recovery": "SparseGPT, 900 steps of recovery",
    "RoI, 900 steps, seed 0": "RoI, 900 steps, seed 0",
    "RoI, 900 steps, seed 1": "RoI, 900 steps, seed 1",
}
# Learners of the study: label, line style, width; the first is wide, so that it shows below those that follow it.
LEARNERS: Final = {
    "roi": ("RoI", "-", 5),
    "straight_through": ("RoI, straight-through", "--", 1.8),
    "linear_anneal": ("RoI, linear annealing", ":", 2.2),
    "maskllm": ("MaskLLM", "-", 1.8),
    "proxsparse": ("ProxSparse", "-", 1.8),
}
_BLUE, _GREY, _GREEN = "#2f6fb2", "#9aa0a6", "#2e7d4f"


def perplexities() -> dict[str, float]:
    """WikiText-2 perplexity by row, as results.md has it."""
    cells = re.findall(r"^\| ([^|]+) \|[^|]*\| \**([\d,.]+)\** \|", (DOCS / "results.md").read_text(), re.M)
    table = {name: float(value.replace(",", "")) for name, value in reversed(cells)}
    return {label: table[row] for row, label in ROWS.items()}


def draw_chart(path: Path) -> None:
    """Bars of perplexity on a log scale."""
    values = perplexities()
    figure, axes = pyplot.subplots(figsize=(7.2, 3.5), layout="constrained")
    colours = [_GREEN if label.startswith("RoI") else _BLUE for label in values]
    colours[0] = _GREY
    bars = axes.barh(list(values), list(values.values()), color=colours, height=0.66)
    axes.bar_label(bars, [f"{value:,.2f}" for value in values.values()], padding=4)
    axes.set_xscale("log")
    axes.set_xlim(10, 10_000)
    axes.set_xticks([10, 100, 1_000, 10_000], ["10", "100", "1,000", "10,000"])
    axes.invert_yaxis()
    axes.set_xlabel("perplexity on WikiText-2, lower is better (log scale)")
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(f"{MODEL} at 2:4", loc="left", fontsize=11)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def draw_learners(path: Path) -> None:
    """Held-out perplexity by tokens seen, the mean over seeds."""
    study = json.loads((DOCS.parent / "benchmarks/results/learners_2of4.json").read_text())
    colours = dict(zip(LEARNERS, ("#8fcfa8", "#14532d", "#111827", "#d97706", "#7c3aed"), strict=True))
    figure, axes = pyplot.subplots(figsize=(7.2, 3.6), layout="constrained")
    for learner, (label, line, width) in LEARNERS.items():
        curves = [cell["curve"] for cell in study["cells"] if cell["method"] == learner]
        tokens = [point[0] / 1000 for point in curves[0]]
        means = [sum(point[1] for point in points) / len(points) for points in zip(*curves, strict=True)]
        axes.plot(tokens, means, line, color=colours[learner], linewidth=width, label=label)
    for label, name in (("dense", "dense"), ("Wanda's mask, the start", "2:4")):
        value = study["references"][name]["held_out"]
        axes.axhline(value, color=_GREY, linestyle=(0, (6, 3)), linewidth=1)
        axes.annotate(
            label, (310, value), (-3, 3), textcoords="offset points", ha="right", color="#5f6368", fontsize=9
        )
    axes.set_yscale("log")
    axes.set_yticks([20, 50, 100, 200, 500], ["20", "50", "100", "200", "500"])
    axes.minorticks_off()
    axes.set_xlim(0, 310)
    axes.set_xlabel("thousand tokens seen")
    axes.set_ylabel("perplexity on held-out text (log scale)")
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(f"{MODEL} at 2:4, mean of two seeds", loc="left", fontsize=11)
    figure.legend(loc="outside right center", frameon=False)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


if __name__ == "__main__":
    draw_chart(IMAGES / "wikitext2_2of4.png")
    draw_learners(IMAGES / "learners_2of4.png")
