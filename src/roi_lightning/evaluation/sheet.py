"""Results as a table without a look: columns of values, their ranks, and what is said beneath each value."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from roi_lightning.evaluation.tasks import Task

Rank = Literal["", "best", "second"]
_Get = Callable[[Mapping[str, Any]], float | None]


@dataclass(frozen=True)
class Cell:
    """One value.

    Attributes:
        text: The value: a perplexity, or an accuracy in percent.
        rank: Among the rows that compete.
        delta: Against the dense row: a perplexity's ratio, an accuracy's difference in points.
        error: Standard error in points.
    """

    text: str = "–"
    rank: Rank = ""
    delta: str = ""
    error: str = ""

    @property
    def notes(self) -> list[str]:
        """What stands beneath the value."""
        return [note for note in (self.delta, self.error) if note]


@dataclass(frozen=True)
class Block:
    """Columns that belong together.

    Attributes:
        title: What their values are.
        labels: Of the columns.
        rows: By model, as many cells as labels.
    """

    title: str
    labels: list[str]
    rows: dict[str, list[Cell]]


@dataclass(frozen=True)
class Sheet:
    """A table.

    Attributes:
        blocks: Its columns from left to right.
        marks: By model, the W/U column: whether pruning updated the weights that survived.
    """

    blocks: list[Block]
    marks: dict[str, str]

    def joined(self) -> Block:
        """All columns as one block."""
        return Block(
            ", ".join(block.title for block in self.blocks),
            [label for block in self.blocks for label in block.labels],
            {name: [cell for block in self.blocks for cell in block.rows[name]] for name in self.marks},
        )


@dataclass(frozen=True)
class _Column:
    label: str
    get: _Get
    error: _Get = field(default=lambda figures: None)
    accuracy: bool = True


def make_sheets(
    results: Mapping[str, Mapping[str, Any]],
    tasks: Sequence[Task],
    updated: Mapping[str, bool | None],
    dense: str | None,
) -> list[Sheet]:
    """Lay out results as in the paper, and a second table for length-normalised accuracies.

    Args:
        results: By model and task, in the order of the rows (`evaluate_models`).
        tasks: In the order of the columns.
        updated: By model, whether pruning changed the surviving weights; None for a dense model.
        dense: The row to compare with; None for no comparison.
    """
    marks = {name: {True: "✓", False: "✗", None: "–"}[updated[name]] for name in results}
    competing = [name for name in results if updated[name] is not None and name != dense] or list(results)
    perplexities = [_perplexity(task) for task in tasks if task.kind != "questions"]
    questions = [task for task in tasks if task.kind == "questions"]
    normed = [t for t in questions if any("acc_norm" in figures[t.name] for figures in results.values())]

    def block(title: str, columns: Sequence[_Column]) -> list[Block]:
        made = [_cells(column, results, competing, dense) for column in columns]
        rows = {name: [cells[name] for cells in made] for name in results}
        return [Block(title, [column.label for column in columns], rows)] if columns else []

    first = block("perplexity ↓", perplexities) + block("accuracy in % ↑", _accuracies(questions, "acc"))
    second = block("length-normalised accuracy (acc_norm) in % ↑", _accuracies(normed, "acc_norm"))
    return [Sheet(blocks, marks) for blocks in (first, second) if blocks]


def average(figures: Mapping[str, Any], names: Sequence[str], metric: str) -> float | None:
    """The mean of a metric over tasks; None if a task lacks it."""
    values = [figures[name].get(metric) for name in names]
    return None if None in values else sum(values) / len(values)


def _perplexity(task: Task) -> _Column:
    return _Column(task.label, lambda figures: figures[task.name], accuracy=False)


def _accuracies(tasks: Sequence[Task], metric: str) -> list[_Column]:
    columns = [_accuracy(task, metric) for task in tasks]
    if len(tasks) > 1:
        names = [task.name for task in tasks]
        columns.append(_Column("Average", lambda figures: average(figures, names, metric)))
    return columns


def _accuracy(task: Task, metric: str) -> _Column:
    return _Column(
        task.label,
        lambda figures: figures[task.name].get(metric),
        lambda figures: figures[task.name].get(f"{metric}_stderr"),
    )


def _cells(
    column: _Column, results: Mapping[str, Mapping[str, Any]], competing: Sequence[str], dense: str | None
) -> dict[str, Cell]:
    values = {name: column.get(figures) for name, figures in results.items()}
    base = None if dense is None else values[dense]
    ranks = _ranks({name: values[name] for name in competing}, column.accuracy)
    cells = {}
    for name, value in values.items():
        if value is None:
            cells[name] = Cell()
            continue
        delta = _delta(value, base, column.accuracy) if base is not None and name != dense else ""
        error = column.error(results[name])
        text = f"{100 * value:.2f}" if column.accuracy else spell_perplexity(value)
        cells[name] = Cell(text, ranks.get(name, ""), delta, "" if error is None else f"±{100 * error:.2f}")
    return cells


def _ranks(values: Mapping[str, float | None], higher_is_better: bool) -> dict[str, Rank]:
    """The best and the second best value; rows with equal values share their rank."""
    known = {name: value for name, value in values.items() if value is not None and not math.isnan(value)}
    if len(known) < 2:
        return {}
    ordered = sorted(set(known.values()), reverse=higher_is_better)
    places: dict[float, Rank] = dict(zip(ordered, ("best", "second"), strict=False))
    return {name: places[value] for name, value in known.items() if value in places}


def _delta(value: float, base: float, accuracy: bool) -> str:
    if accuracy:
        points = 100 * (value - base)
        return f"{'+' if points >= 0 else '−'}{abs(points):.2f}"
    ratio = value / base
    if not math.isfinite(ratio) or ratio == 0:  # nothing can be said against an infinite perplexity
        return ""
    return f"×{ratio:.2f}" if ratio < 100 else f"×{ratio:.0f}" if ratio < 1e5 else f"×{ratio:.0e}"


def spell_perplexity(value: float) -> str:
    """Two digits after the point, fewer where they mean nothing."""
    if not math.isfinite(value) or value < 1000:
        return f"{value:.2f}"
    return f"{value:,.0f}" if value < 1e5 else f"{value:.1e}"
