"""What all figures share: colours, a style that no configuration changes, title and note, and text that is cut."""

import io
import textwrap
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

DPI: Final = 200
KEPT, PRUNED, INK, FAINT, ACCENT = "#22304a", "#e6e9ef", "#1b1f27", "#667080", "#d55e00"
# Names are in a font whose letters are all 0.6 of its size wide: a number of letters is a width.
NAME: Final[dict[str, Any]] = {"family": "DejaVu Sans Mono", "size": 8.5}
# Okabe and Ito's colours, told apart by every kind of colour vision; the markers tell them apart in print.
_LINES: Final = ("#0072b2", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#d55e00")
_MARKERS: Final = ("o", "s", "^", "D", "v", "P", "X")


def to_png(figure: Figure) -> bytes:
    """Render a figure; the same figure gives the same bytes."""
    return _render(figure, format="png", dpi=DPI, metadata={"Software": None})


def to_svg(figure: Figure) -> bytes:
    """Render a figure on a transparent ground; the same figure gives the same bytes."""
    return _render(figure, format="svg", transparent=True, metadata={"Date": None})


def _render(figure: Figure, **options: Any) -> bytes:
    buffer = io.BytesIO()
    with own_style(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # a name in a script the font lacks
        figure.savefig(buffer, **options)
    return buffer.getvalue()


@contextmanager
def own_style() -> Iterator[None]:
    """Matplotlib's defaults, whatever the user's `matplotlibrc` says; a `$` in a name is no formula."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams |= {"text.parse_math": False, "svg.hashsalt": "roi"}
        yield


def titled_figure(title: str, note: str, width: float, height: float) -> Figure:
    """An empty figure with a title across the top and a note across the bottom.

    Args:
        title: At most three lines of it are shown.
        note: What the reader needs to know.
        width: In inches.
        height: In inches, without title and note.
    """
    title, note = wrap(title, int(9 * width), 3), wrap(note, int(15 * width))
    height += 0.2 * title.count("\n") + 0.15 * note.count("\n") + 0.7
    layout = ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1)
    figure = Figure((width, height), DPI, facecolor="white", layout=layout)
    left: dict[str, Any] = {"x": 0.1 / width, "ha": "left"}
    figure.suptitle(title, size=12, weight="bold", color=INK, **left)
    figure.supxlabel(note, size=8.5, color=FAINT, linespacing=1.25, **left)
    return figure


def wrap(text: str, width: int, lines: int = 99) -> str:
    """Break text into lines of so many letters; what is left after so many lines is cut off."""
    broken = textwrap.wrap(text, width)
    if len(broken) > lines:
        broken = [*broken[: lines - 1], f"{broken[lines - 1][: width - 1]}…"]
    return "\n".join(broken)


def percent(share: float) -> str:
    """`50 %`, to three digits, with a space that no line breaks at."""
    return f"{100 * share:.3g}\N{NO-BREAK SPACE}%"


def line_style(index: int, points: int) -> dict[str, Any]:
    """How to draw a line of so many points; the first 49 all differ in colour or marker."""
    colour, marker = _LINES[index % len(_LINES)], _MARKERS[(index + index // len(_LINES)) % len(_MARKERS)]
    return {
        "color": colour,
        "marker": marker,
        "markersize": 3.5 if points <= 40 else 2.2,
        "markeredgewidth": 0,
        "linewidth": 1.3,
    }


def style_axes(axes: Axes, x: str, y: str) -> None:
    """Name the axes of a panel of lines, and draw them so that the lines stand out."""
    axes.set_xlabel(x, size=8, color=FAINT)
    axes.set_ylabel(y, size=8, color=FAINT)
    axes.tick_params(which="both", labelsize=7.5, colors=FAINT, length=2.5, width=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set(color=FAINT, linewidth=0.6)
    axes.grid(axis="y", color=PRUNED, linewidth=0.7)
    axes.set_axisbelow(True)
