"""Title and note across the top of a figure."""

from typing import Any

from matplotlib.figure import Figure

from roi_lightning.figures.style import FAINT, INK, LINE, MARGIN
from roi_lightning.figures.text import wrap


class Headline:
    """Title and note across the top of a figure, `height` inches in all.

    Args:
        title: At most four lines of it are shown.
        note: What the reader needs to know, below the title.
        width: Of the figure, in inches.
    """

    def __init__(self, title: str, note: str, width: float) -> None:
        self.title = wrap(title, width - 2 * MARGIN, 12, "bold", most=4)
        self.note = wrap(note, width - 2 * MARGIN, 8.5)
        self._below = MARGIN + 0.22 * len(self.title) + 0.05
        self.height = self._below + LINE * len(self.note)

    def draw(self, figure: Figure) -> None:
        """Write both at the top left."""
        width, height = figure.get_size_inches()
        style: dict[str, Any] = {"ha": "left", "va": "top"}
        x = MARGIN / width
        title, note = "\n".join(self.title), "\n".join(self.note)
        figure.text(x, 1 - MARGIN / height, title, size=12, weight="bold", color=INK, **style)
        figure.text(x, 1 - self._below / height, note, size=8.5, color=FAINT, linespacing=1.25, **style)
