"""Text whose size is known before it is drawn: measured, wrapped, elided; and percentages spelled out."""

import warnings
from functools import lru_cache
from typing import Final

from matplotlib.font_manager import FontProperties, findfont, get_font

from roi_lightning.figures.style import DPI

_BREAKS: Final = frozenset(" /_-.=")


def percent(share: float) -> str:
    """`50.0 %`."""
    return f"{100 * share:.1f} %"


def rough_percent(share: float) -> str:
    """`50 %`, to three digits, with a space that no line breaks at."""
    return f"{100 * share:.3g}\N{NO-BREAK SPACE}%"


def wrap(text: str, limit: float, size: float, weight: str = "normal", most: int = 99) -> list[str]:
    """Break text into lines of at most `limit` inches; beyond `most` lines the middle goes."""
    lines, head, tail = _broken(text, limit, size, weight), len(text) // 2, len(text) // 2
    while len(lines) > most and head > 1:
        head, tail = head - 1, tail - 1
        lines = _broken(f"{text[:head]}…{text[-tail:]}", limit, size, weight)
    return lines


def _broken(text: str, limit: float, size: float, weight: str) -> list[str]:
    lines, rest = [], text
    while rest and text_width(rest, size, weight) > limit:
        too_wide = (i for i in range(1, len(rest)) if text_width(rest[: i + 1], size, weight) > limit)
        fit = next(too_wide, len(rest))
        at = max((i + 1 for i in range(fit) if rest[i] in _BREAKS), default=fit)
        at = at if rest[at - 1] == " " or at > 0.4 * fit else fit
        lines.append(rest[:at].rstrip())
        rest = rest[at:]
    return [*lines, rest] if rest or not lines else lines


def elide(text: str, limit: float, size: float, weight: str = "normal") -> str:
    """Text of at most `limit` inches, its middle left out as far as needed."""
    return wrap(text, limit, size, weight, most=1)[0]


@lru_cache(4096)
def text_width(text: str, size: float, weight: str = "normal") -> float:
    """The width in inches of a line in matplotlib's default font, sizes in points."""
    font = get_font(findfont(FontProperties(family="DejaVu Sans", weight=weight)))
    font.set_size(size, DPI)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        font.set_text(text)
    width, _ = font.get_width_height()
    return width / 64 / DPI
