"""What the figures have in common: colours, sizes in inches, and a style that no configuration changes."""

import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import matplotlib
from matplotlib.figure import Figure

DPI: Final = 200
# In inches; a LINE is the height of a line of text.
MARGIN: Final = 0.25
NARROWEST: Final = 5.2
LINE: Final = 0.155
KEPT, PRUNED, INK, FAINT, ACCENT = "#22304a", "#e6e9ef", "#1b1f27", "#667080", "#d55e00"
# Okabe and Ito's colours, told apart by every kind of colour vision; the markers tell them apart in print.
_LINES: Final = ("#0072b2", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#d55e00")
_MARKERS: Final = ("o", "s", "^", "D", "v", "P", "X")


def to_png(figure: Figure) -> bytes:
    """Render a figure; the same figure gives the same bytes."""
    buffer = io.BytesIO()
    with own_style(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # a name in a script the font lacks
        figure.savefig(buffer, format="png", dpi=DPI, metadata={"Software": None})
    return buffer.getvalue()


@contextmanager
def own_style() -> Iterator[None]:
    """Matplotlib's defaults, whatever the user's `matplotlibrc` says; a `$` in a name is no formula."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams["text.parse_math"] = False
        yield


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
