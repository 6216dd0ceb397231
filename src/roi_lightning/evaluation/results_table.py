"""Results as in the paper: perplexities and accuracies side by side, ranked, and compared with the dense model's."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from rich.console import Console
from rich.text import Text

from roi_lightning.evaluation.config import PERPLEXITIES, ZERO_SHOT
from roi_lightning.evaluation.run import Evaluation
from roi_lightning.utils.tables import markdown_table, print_table

Rank = Literal["", "best", "second"]
Figures = Mapping[str, Mapping[str, float]]
_LABELS: Final = PERPLEXITIES | ZERO_SHOT | {"average": "Average"}
_STYLES: Final = {"": "", "best": "bold", "second": "underline"}
_MARKUP: Final = {"": ("", ""), "best": ("**", "**"), "second": ("<u>", "</u>")}
_UPDATED: Final = {True: "✓", False: "✗", None: "–"}


@dataclass(frozen=True)
class Cell:
    """One value.

    Attributes:
        text: A perplexity, an accuracy in percent, or another figure of the harness as it gives it.
        rank: Among the rows that compete.
        notes: A perplexity's ratio to the dense row's, or another value's difference from it; the standard error; the
            length-normalised accuracy.
    """

    text: str
    rank: Rank
    notes: tuple[str, ...]

    def rich(self) -> Text:
        """For a terminal."""
        notes = [Text(note, "dim") for note in self.notes]
        return Text("\n").join([Text(self.text, _STYLES[self.rank]), *notes])

    def markdown(self) -> str:
        """For GitHub: **best**, <u>second</u>."""
        before, after = _MARKUP[self.rank]
        return "<br>".join([f"{before}{self.text}{after}", *(f"<sub>{note}</sub>" for note in self.notes)])


@dataclass(frozen=True)
class ResultsTable:
    """A row per model.

    Attributes:
        head: Of all columns.
        rows: By model, whether pruning updated the kept weights, and the cells of the further columns.
    """

    head: list[str]
    rows: dict[str, tuple[str, list[Cell]]]

    def print(self, console: Console | None = None) -> None:
        """Print it on a terminal; standard output if left out."""
        rows: list[list[str | Text] | None] = []
        for name, (mark, cells) in self.rows.items():
            rows += [None, [name, mark, *(cell.rich() for cell in cells)]]
        print_table([label.replace(" ", "\n") for label in self.head], rows[1:], left=2, console=console)

    def markdown(self) -> str:
        """For GitHub."""
        rows = [
            [name, mark, *(cell.markdown() for cell in cells)] for name, (mark, cells) in self.rows.items()
        ]
        return markdown_table(self.head, rows, left=2)


def make_table(evaluation: Evaluation) -> ResultsTable:
    """Lay out results as in the paper.

    Of a task or group of the harness it has the first metric, with each of its filters; the others are in the JSON.
    """
    updated = {model.name: model.updated for model in evaluation.models}
    pruned = [name for name, mark in updated.items() if mark is not None and name != evaluation.dense]
    head, columns = ["model", "W/U"], []
    for task, key, figures in _shown(evaluation):
        metric = key.partition(",")[0]
        better = evaluation.harness.get("higher_is_better", {}).get(task, {}).get(metric, key != "perplexity")
        head.append(f"{_LABELS.get(task, f'{task} {key}')} {'↑' if better else '↓'}")
        columns.append(_cells(figures, key, bool(better), pruned or list(updated), evaluation.dense))
    rows = {name: (_UPDATED[mark], [cells[name] for cells in columns]) for name, mark in updated.items()}
    return ResultsTable(head, rows)


def _shown(evaluation: Evaluation) -> Iterator[tuple[str, str, Figures]]:
    """Task, key and figures of every column."""
    groups = evaluation.harness.get("groups", {})
    below = evaluation.harness.get("group_subtasks", {})
    members = {member for group in groups for member in below.get(group, ())}
    tasks = list(next(iter(evaluation.results.values())))
    for task in [*(x for x in _LABELS if x in tasks), *(x for x in tasks if x not in _LABELS)]:
        values = {name: metrics[task] for name, metrics in evaluation.results.items()}
        figures = {name: x if isinstance(x, dict) else {"perplexity": x} for name, x in values.items()}
        keys = [key for key in next(iter(figures.values())) if key != "samples" and "_stderr" not in key]
        for key in keys if task not in members else ():
            if key.partition(",")[0] == keys[0].partition(",")[0]:
                yield task, key, figures


def _cells(
    figures: Figures, key: str, higher_is_better: bool, competing: Sequence[str], dense: str | None
) -> dict[str, Cell]:
    metric, comma, kind = key.partition(",")
    # Accuracies are fractions of 1, in whatever words a name has them; of other scales nothing is known.
    percent = metric == "exact_match" or "acc" in metric.split("_")
    scale, form = (100, ".2f") if percent else (1, ".4f")
    ranks = _ranks({name: figures[name][key] for name in competing}, higher_is_better)
    cells = {}
    for name, metrics in figures.items():
        value, error, norm = (
            metrics[key],
            metrics.get(f"{metric}_stderr{comma}{kind}"),
            metrics.get("acc_norm"),
        )
        notes = []
        if dense is not None and name != dense:
            base = figures[dense][key]
            notes.append(
                _ratio(value / base) if "perplexity" in metric else f"{scale * (value - base):+{form}}"
            )
        notes.append("" if error is None else f"±{scale * error:{form}}")
        notes.append("" if norm is None or metric != "acc" else f"norm {100 * norm:.2f}")
        text = spell_perplexity(value) if "perplexity" in metric else f"{scale * value:{form}}"
        cells[name] = Cell(text, ranks.get(name, ""), tuple(filter(None, notes)))
    return cells


def _ranks(values: Mapping[str, float], higher_is_better: bool) -> dict[str, Rank]:
    """The best and the second best value; rows with equal values share their rank."""
    known = {name: value for name, value in values.items() if not math.isnan(value)}
    if len(known) < 2:
        return {}
    ordered = sorted(set(known.values()), reverse=higher_is_better)
    ranks: dict[float, Rank] = dict(zip(ordered, ("best", "second"), strict=False))
    return {name: ranks[value] for name, value in known.items() if value in ranks}


def _ratio(value: float) -> str:
    if not math.isfinite(value) or value == 0:  # nothing can be said against an infinite perplexity
        return ""
    return f"×{value:.2f}" if value < 100 else f"×{value:.0f}" if value < 1e5 else f"×{value:.0e}"


def spell_perplexity(value: float) -> str:
    """Two digits after the point, fewer where they mean nothing."""
    if not math.isfinite(value) or value < 1000:
        return f"{value:.2f}"
    return f"{value:,.0f}" if value < 1e5 else f"{value:.1e}"
