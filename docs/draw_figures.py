"""Draws the pictures of README and results.md: the pipeline, the methods' bars, the learners' curves.

python docs/draw_figures.py

The bars are of the table in `results.md`, the curves of what the study recorded, so that a figure is typed once.
"""

import json
import re
from html import escape
from pathlib import Path
from typing import Final

from matplotlib import pyplot

DOCS: Final = Path(__file__).resolve().parent
IMAGES: Final = DOCS / "images"
# Rows of results.md's first table, and the labels of their bars.
ROWS: Final = {
    "dense": "dense model",
    "magnitude": "magnitude",
    "Wanda": "Wanda",
    "SparseGPT": "SparseGPT",
    "RoI, 150 steps": "RoI, 150 steps",
    "RoI, a million tokens": "RoI, a million tokens",
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
# Title and lines of each stage; the third is one group of 2:4.
_STAGES: Final = (
    ("Text", ("windows of", "calibration text")),
    ("Logits", ("one per weight,", "the model frozen")),
    ("Gumbel-Top-K", ("samples 2 of 4,", "differentiably")),
    ("Mask", ("the 2 largest", "logits of every 4")),
    ("Checkpoint", ("Hugging Face files,", "exact zeros")),
)
_BOX, _GAP, _TOP, _TALL = 156, 34, 62, 150


def perplexities() -> dict[str, float]:
    """WikiText-2 perplexity by row, as results.md has it."""
    cells = re.findall(r"^\| ([^|]+) \|[^|]*\| \**([\d,.]+)\** \|", (DOCS / "results.md").read_text(), re.M)
    table = {name: float(value.replace(",", "")) for name, value in reversed(cells)}
    return {label: table[row] for row, label in ROWS.items()}


def draw_chart(path: Path) -> None:
    """Bars of perplexity on a log scale."""
    values = perplexities()
    figure, axes = pyplot.subplots(figsize=(7.2, 2.9), layout="constrained")
    colours = [_GREY, _BLUE, _BLUE, _BLUE, _GREEN, _GREEN]
    bars = axes.barh(list(values), list(values.values()), color=colours, height=0.66)
    axes.bar_label(bars, [f"{value:,.2f}" for value in values.values()], padding=4)
    axes.set_xscale("log")
    axes.set_xlim(10, 10_000)
    axes.set_xticks([10, 100, 1_000, 10_000], ["10", "100", "1,000", "10,000"])
    axes.invert_yaxis()
    axes.set_xlabel("perplexity on WikiText-2, lower is better (log scale)")
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title("SmolLM2-135M-Instruct at 2:4", loc="left", fontsize=11)
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
    axes.set_title("SmolLM2-135M-Instruct at 2:4, mean of two seeds", loc="left", fontsize=11)
    figure.legend(loc="outside right center", frameon=False)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def pipeline_svg() -> str:
    """The five stages from text to checkpoint, on a white card that is readable on any background."""
    width = 2 * 24 + len(_STAGES) * _BOX + (len(_STAGES) - 1) * _GAP
    height = _TOP + _TALL + 66
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="Helvetica, Arial, sans-serif" role="img" '
        'aria-label="Text, logits, Gumbel-Top-K, mask, checkpoint">',
        '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
        'orient="auto-start-reverse"><path d="M0 0 L8 4 L0 8 z" fill="#5f6368"/></marker></defs>',
        f'<rect x="1" y="1" width="{width - 2}" height="{height - 2}" rx="12" fill="#ffffff" stroke="#dadce0"/>',
        _words(24, 36, "How a mask is learned, at 2:4: keep 2 of every 4 weights", 17, "#202124", "bold"),
    ]
    for number, (title, words) in enumerate(_STAGES):
        x = 24 + number * (_BOX + _GAP)
        lines += [
            f'<rect x="{x}" y="{_TOP}" width="{_BOX}" height="{_TALL}" rx="8" fill="#f6f8fa" stroke="{_BLUE}"/>',
            _words(x + _BOX / 2, _TOP + 26, title, 15, _BLUE, "bold", "middle"),
            *_example(number, x),
            *(
                _words(x + _BOX / 2, _TOP + 112 + 18 * row, text, 13, "#3c4043", anchor="middle")
                for row, text in enumerate(words)
            ),
        ]
        if number:
            lines.append(_arrow(f"M{x - _GAP + 3} {_TOP + _TALL / 2} H{x - 3}"))
    below = _TOP + _TALL
    first, last = 24 + _BOX + _GAP + _BOX / 2, 24 + 2 * (_BOX + _GAP) + _BOX / 2
    lines += [
        _arrow(f"M{last} {below + 2} V{below + 30} H{first} V{below + 4}"),
        _words(
            (first + last) / 2, below + 48, "gradient of the next-token loss", 13, "#3c4043", anchor="middle"
        ),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _example(number: int, x: float) -> list[str]:
    """What one group of four weights looks like at a stage."""
    left, y = x + (_BOX - 4 * 32) / 2, _TOP + 46
    if number == 0:
        bars = ((0, 116), (16, 128), (32, 90))
        return [
            f'<rect x="{left}" y="{y + dy}" width="{w}" height="8" rx="4" fill="#bdc1c6"/>' for dy, w in bars
        ]
    cells = (
        (("0.7", 0.55), ("-0.2", 0.15), ("0.4", 0.4), ("0.1", 0.25)),
        ((".93", 0.9), (".08", 0.1), (".71", 0.65), (".28", 0.3)),
        (("1", 1.0), ("0", 0.0), ("1", 1.0), ("0", 0.0)),
        (("w₁", 1.0), ("0", 0.0), ("w₃", 1.0), ("0", 0.0)),
    )[number - 1]
    drawn = []
    for i, (text, shade) in enumerate(cells):
        ink = "#ffffff" if shade > 0.5 else "#202124"
        drawn += [
            f'<rect x="{left + 32 * i}" y="{y}" width="30" height="34" rx="4" fill="{_GREEN}" '
            f'fill-opacity="{shade}" stroke="{_GREEN}"/>',
            _words(left + 32 * i + 15, y + 22, text, 13, ink, anchor="middle"),
        ]
    return drawn


def _words(
    x: float, y: float, text: str, size: int, colour: str, weight: str = "normal", anchor: str = "start"
) -> str:
    return (
        f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{colour}" font-weight="{weight}" '
        f'text-anchor="{anchor}">{escape(text)}</text>'
    )


def _arrow(path: str) -> str:
    return f'<path d="{path}" fill="none" stroke="#5f6368" stroke-width="2" marker-end="url(#head)"/>'


if __name__ == "__main__":
    IMAGES.mkdir(exist_ok=True)
    (IMAGES / "pipeline.svg").write_text(pipeline_svg(), encoding="utf-8")
    draw_chart(IMAGES / "wikitext2_2of4.png")
    draw_learners(IMAGES / "learners_2of4.png")
