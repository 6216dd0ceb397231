"""Curves and perplexities as SVG for a page: drawn by matplotlib, coloured by the page's CSS."""

import io
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final
from xml.etree import ElementTree

import matplotlib
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from roi_lightning.plots.layout import FAINT, INK, PRUNED, own_style, style_axes, wrap

Points = Sequence[tuple[int, float]]
SERIES: Final = 7  # colours of lines that the page's CSS has
MOST_POINTS: Final = 300
_ROWS: Final = 12
# What matplotlib draws in → what the page's CSS calls it, in light and in dark.
_PAINT: Final = {f"#0000{number:02x}": f"var(--line-{number})" for number in range(1, SERIES + 1)} | {
    FAINT: "var(--faint)",
    INK: "var(--ink)",
    PRUNED: "var(--rule)",
}
_COLOUR: Final = re.compile("|".join(_PAINT))
# As multiples of the width of a line.
_DASHES: Final = ((), (5, 2), (1.5, 1.5), (7, 2, 1.5, 2), (9, 3), (3, 3), (5, 2, 1.5, 2, 1.5, 2))
_DECIMALS: Final = re.compile(r"(\.\d)\d+")
_FONTS: Final = re.compile(r" ?font-family: [^;]*;")
_SPAN: Final = 8  # of a scale of perplexities, at least, so that it has round numbers to show
_STRETCHES: Final = 40  # that a smooth line has the means of
_HEIGHT: Final = 200
_WIDTH: Final = 360  # of a figure, in the units of its viewBox


@dataclass(frozen=True)
class Series:
    """A line.

    Attributes:
        label: Of the run, or of the quantity.
        points: Optimizer step and value, not thinned.
        number: Of its colour, from 1 on.
    """

    label: str
    points: Points
    number: int = 1


@dataclass(frozen=True)
class Chart:
    """A figure and what a reader without scripts gets of it.

    Attributes:
        name: Unique on the page; its ids begin with it.
        title: What is drawn.
        note: What it means, in a line.
        svg: The picture.
        data: For the script that shows values: axes in the units of the viewBox, and the points.
        rows: A table of at most twelve steps: step and a value for each series.
        labels: The series.
        summary: In words: first, last, least and greatest value of each series.
    """

    name: str
    title: str
    note: str
    svg: Markup
    data: dict[str, Any] = field(default_factory=dict)
    rows: list[list[str]] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)
    summary: list[str] = field(default_factory=list)


def thin(points: Points, most: int = MOST_POINTS) -> list[tuple[int, float]]:
    """Fewer points that look the same: of every stretch the first, the least, the greatest, and all not finite.

    Args:
        points: In the order of their steps.
        most: So many points may stay, not counting those that are not finite.

    Returns:
        Some of them, in the same order.
    """
    if len(points) <= most:
        return list(points)
    stretch = math.ceil(3 * len(points) / most)
    kept = {0, len(points) - 1}
    for start in range(0, len(points), stretch):
        numbers = range(start, min(start + stretch, len(points)))
        finite = [i for i in numbers if math.isfinite(points[i][1])]
        kept |= {i for i in numbers if i not in finite}
        if finite:
            by_value = sorted(finite, key=lambda i: points[i][1])
            kept |= {finite[0], by_value[0], by_value[-1]}
    return [points[i] for i in sorted(kept)]


def draw_curve(
    name: str,
    title: str,
    note: str,
    series: Sequence[Series],
    legs: Sequence[int] = (),
    *,
    smooth: bool = False,
    log: bool = False,
) -> Chart:
    """Draw values over optimizer steps, a line per series.

    Args:
        name: See `Chart`.
        title: See `Chart`.
        note: See `Chart`.
        series: At least one, none empty.
        legs: Steps at which a run was resumed; drawn as vertical lines.
        smooth: Whether values are noisy: of long lines the running mean stands out, the values stay behind it.
        log: Whether the vertical axis is logarithmic where values span more than a factor of five.
    """
    lines = [Series(line.label, thin(line.points), line.number) for line in series]
    figure = Figure((_WIDTH / 72, _HEIGHT / 72))
    span = max(len(line.points) for line in series) // _STRETCHES if smooth else 0
    with own_style():
        matplotlib.rcParams["svg.fonttype"] = "none"
        axes = figure.add_axes((0.15, 0.16, 0.825, 0.79))
        for leg in legs:
            axes.axvline(leg, color=FAINT, linewidth=0.9, linestyle=(0, (3, 3)))
        for line, whole in zip(lines, series, strict=True):
            _plot(axes, line, faint=(0.45 if len(lines) == 1 else 0.15) if span > 1 else 0)
            if span > 1:
                _plot(axes, Series("", thin(running_mean(whole.points, span)), line.number))
        _scale(axes, [value for line in lines for _, value in line.points if math.isfinite(value)], log)
        style_axes(axes, "optimizer step", "")
        axes.tick_params(labelsize=10)
        axes.xaxis.label.set_fontsize(10)
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True, steps=[1, 2, 5, 10]))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}"))
        summary = [_in_words(one) for one in series]
        svg = _svg(figure, name, f"{title}: {'; '.join(summary)}")
    if span > 1:
        note = f"{note} The strong line is the mean of {span} values.".strip()
    labels = [one.label for one in series]
    return Chart(name, title, note, svg, _data(axes, lines), _table(series), labels, summary)


def running_mean(points: Points, span: int) -> list[tuple[int, float]]:
    """The mean of the last `span` finite values at every step that has one."""
    means, values = [], []
    for step, value in points:
        if math.isfinite(value):
            values.append(value)
            means.append((step, sum(values[-span:]) / len(values[-span:])))
    return means


def _plot(axes: Axes, line: Series, *, faint: float = 0) -> None:
    colour = _colour(line.number)
    steps, values = zip(*line.points, strict=True)
    look: dict[str, Any] = {"linewidth": 0.8, "alpha": faint} if faint else {"linewidth": 1.5}
    if sum(map(math.isfinite, values)) <= 40:
        look |= {"marker": "o", "markersize": 3.5, "markeredgewidth": 0}
    if dashes(line.number) and not faint:
        look["linestyle"] = (0, dashes(line.number))
    shown = [value if math.isfinite(value) else math.nan for value in values]
    axes.plot(steps, shown, color=colour, **look)
    for step, value in line.points:
        if not math.isfinite(value):
            axes.plot([step], [0.96], "x", color=colour, markersize=7, transform=axes.get_xaxis_transform())


def _colour(number: int) -> str:
    """Of a line, from 1 on; 0 is grey."""
    return f"#0000{number_of_colour(number):02x}" if number else FAINT


def number_of_colour(number: int) -> int:
    """Of the page's CSS, for the number of a line."""
    return (number - 1) % SERIES + 1


def dashes(number: int) -> tuple[float, ...]:
    """How a line is broken: lines differ without colours, too. Empty for an unbroken one."""
    return _DASHES[(number - 1) % SERIES]


def _scale(axes: Axes, values: Sequence[float], log: bool) -> None:
    if log and values and 0 < 5 * min(values) < max(values):
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(_log_ticks(max(values) / min(values)))
        axes.yaxis.set_minor_locator(NullLocator())
    else:
        axes.margins(y=0.1)
        axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: spell(y)))


def spell(value: float) -> str:
    """A number in four digits, with thousands apart: `1,234`, `0.005`, `1.5e-05`."""
    if not math.isfinite(value):
        return {"nan": "NaN", "inf": "∞", "-inf": "−∞"}[str(value)]
    if value == 0:
        return "0"
    if abs(value) >= 1e6 or abs(value) < 1e-4:
        return f"{value:.3g}".replace("-", "−")
    text = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return text.replace("-", "−")


def _in_words(series: Series) -> str:
    """`loss from 4.21 to 3.05, lowest 2.98 at step 40, highest 4.3 at step 2`."""
    finite = [(step, value) for step, value in series.points if math.isfinite(value)]
    broken = [step for step, value in series.points if not math.isfinite(value)]
    parts = []
    if finite:
        low, high = min(finite, key=lambda p: p[1]), max(finite, key=lambda p: p[1])
        parts.append(f"{spell(finite[0][1])} at step {finite[0][0]:,}")
        if len(finite) > 1:
            parts[0] = f"from {parts[0]} to {spell(finite[-1][1])} at step {finite[-1][0]:,}"
        for word, (step, value), ends in (("lowest", low, finite), ("highest", high, finite)):
            if value not in (ends[0][1], ends[-1][1]):
                parts.append(f"{word} {spell(value)} at step {step:,}")
    if broken:
        parts.append(f"not finite at step {', '.join(f'{step:,}' for step in broken[:3])}")
    label = f"{series.label} " if series.label else ""
    return label + ", ".join(parts)


def _table(series: Sequence[Series]) -> list[list[str]]:
    """At most twelve steps, evenly spaced over all steps that any series has, the last one among them."""
    values = [dict(one.points) for one in series]
    steps = sorted({step for one in values for step in one})
    if len(steps) > _ROWS:
        steps = [steps[round(i * (len(steps) - 1) / (_ROWS - 1))] for i in range(_ROWS)]
    return [[f"{step:,}", *(spell(v[step]) if step in v else "–" for v in values)] for step in steps]


def _data(axes: Axes, lines: Sequence[Series]) -> dict[str, Any]:
    """Where values lie in the picture, and the values to four digits."""
    box = axes.get_position()
    (left, right), (low, high) = axes.get_xlim(), axes.get_ylim()
    return {
        "x": [left, right, round(box.x0 * _WIDTH, 2), round(box.x1 * _WIDTH, 2)],
        "y": [low, high, round((1 - box.y0) * _HEIGHT, 2), round((1 - box.y1) * _HEIGHT, 2)],
        "log": axes.get_yscale() == "log",
        "lines": [
            {
                "label": line.label,
                "number": number_of_colour(line.number),
                "steps": [step for step, _ in line.points],
                "values": [float(f"{v:.4g}") if math.isfinite(v) else spell(v) for _, v in line.points],
            }
            for line in lines
        ],
    }


def draw_perplexities(name: str, rows: Sequence[tuple[str, float, int]]) -> Chart:
    """Draw perplexities on a logarithmic scale, a row per mask.

    Args:
        name: See `Chart`.
        rows: The name to show, the perplexity, and the number of its colour; 0 for none.
    """
    finite = [value for _, value, _ in rows if math.isfinite(value)] or [1.0]
    low, high = min(finite) / 1.3, max(finite) * 1.3
    beyond = max(1.0, _SPAN * low / high) ** 0.5  # so much on either side
    low, high = low / beyond, high * beyond
    height = 26 * len(rows) + 34
    figure = Figure((_WIDTH / 72, height / 72))
    with own_style():
        matplotlib.rcParams["svg.fonttype"] = "none"
        axes = figure.add_axes((0.37, 32 / height, 0.5, 1 - 34 / height))
        axes.set_xscale("log")
        axes.set_xlim(low, high)
        axes.set_ylim(len(rows) - 0.5, -0.5)
        for row, (_, value, number) in enumerate(rows):
            shown = value if math.isfinite(value) else high
            axes.hlines(row, low, shown, color=_colour(number), linewidth=7, alpha=0.35)
            axes.plot([shown], [row], "o", color=_colour(number), markersize=8, markeredgewidth=0)
            where: dict[str, Any] = {"xytext": (8, -3.6), "textcoords": "offset points", "size": 10.5}
            axes.annotate(spell_perplexity(value), (shown, row), color=INK, annotation_clip=False, **where)
        style_axes(axes, "perplexity, logarithmic: lower is better", "")
        axes.grid(visible=False, axis="y")
        axes.grid(axis="x", color=PRUNED, linewidth=0.7)
        axes.set_yticks(range(len(rows)), [wrap(label, 21, 1) for label, _, _ in rows])
        axes.tick_params(labelsize=10)
        axes.tick_params(axis="y", labelsize=10.5, length=0, labelcolor=INK)
        axes.xaxis.label.set_fontsize(10)
        axes.xaxis.set_major_locator(_log_ticks(high / low))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: spell(x)))
        words = [f"{label} {spell_perplexity(value)}" for label, value, _ in rows]
        svg = _svg(figure, name, f"Perplexity on held-out text: {'; '.join(words)}")
    return Chart(name, "Perplexity on held-out text", "", svg)


def _log_ticks(ratio: float) -> LogLocator:
    """Ticks that stand apart where the largest value is so many times the smallest."""
    return LogLocator(subs=(1, 2, 5) if ratio < 20 else (1, 3) if ratio < 500 else (1,))


def spell_perplexity(value: float) -> str:
    """Two digits after the point, fewer where they mean nothing."""
    if not math.isfinite(value) or value >= 1e5:
        return spell(value)
    return f"{value:,.2f}" if value < 1000 else f"{value:,.0f}"


def _svg(figure: Figure, name: str, description: str) -> Markup:
    """The picture without what belongs to a file of its own, with ids that no other has and the page's colours."""
    buffer = io.BytesIO()
    matplotlib.rcParams["svg.hashsalt"] = name
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    root = ElementTree.fromstring(buffer.getvalue())
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
        element.attrib = {key.rpartition("}")[2]: value for key, value in element.attrib.items()}
    used = set(re.findall(r"#(\w+)", " ".join(v for e in root.iter() for v in e.attrib.values())))
    for element in root.iter():
        for key, value in element.attrib.items():
            if key == "id":
                continue
            if key == "d":
                value = _DECIMALS.sub(r"\1", value)
            elif key == "style":
                value = _FONTS.sub("", value)
            element.attrib[key] = _COLOUR.sub(lambda found: _PAINT[found[0]], value)
            if key in ("href", "clip-path", "style"):
                element.attrib[key] = re.sub(r"(^|url\()#(?!\d)(\w+)", rf"\1#{name}-\2", element.attrib[key])
        if "id" in element.attrib:
            own = element.attrib.pop("id")
            element.attrib |= {"id": f"{name}-{own}"} if own in used else {}
        for child in list(element):
            if child.tag in ("metadata", "style") or (
                child.tag == "defs" and child.find("style") is not None
            ):
                element.remove(child)
    for key in ("version", "width", "height"):
        root.attrib.pop(key, None)
    root.attrib |= {"role": "img", "aria-label": description}
    return Markup(ElementTree.tostring(root, encoding="unicode"))
