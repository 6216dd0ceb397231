"""Results as in the paper: perplexities and accuracies side by side, ranked, and compared with the dense model's."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from rich.console import Console
from rich.text import Text

from roi_lightning.evaluation.tasks import Task
from roi_lightning.utils.tables import markdown_table, print_table

Rank = Literal["", "best", "second"]
Values = Mapping[str, float | None]
_STYLES: Final = {"": "", "best": "bold", "second": "underline"}
_MARKUP: Final = {"": ("", ""), "best": ("**", "**"), "second": ("<u>", "</u>")}
_NO_BREAK: Final = "\u00a0"
_UPDATED: Final = {True: "✓", False: "✗", None: "–"}


@dataclass(frozen=True)
class Cell:
    """One value.

    Attributes:
        text: A perplexity, an accuracy in percent, or another figure of the harness as it gives it.
        rank: Among the rows that compete.
        notes: Below the value: a perplexity's ratio to the dense row's, or another value's difference from it, and
            the standard error, both of an accuracy in points.
    """

    text: str = "–"
    rank: Rank = ""
    notes: tuple[str, ...] = ()

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
    """A table.

    Attributes:
        title: What its values are.
        labels: Of the columns of values.
        marks: By model, the W/U column: whether pruning updated the kept weights.
        rows: By model, as many cells as labels.
    """

    title: str
    labels: list[str]
    marks: dict[str, str]
    rows: dict[str, list[Cell]]

    def print(self, console: Console | None = None) -> None:
        """Print it on a terminal; standard output if left out."""
        head = ["model", "W/U", *(label.replace(" ", "\n") for label in self.labels)]
        rows: list[list[str | Text] | None] = []
        for name, cells in self.rows.items():
            rows += [None, [name, self.marks[name], *(cell.rich() for cell in cells)]]
        print_table(head, rows[1:], self.title, left=2, console=console)

    def markdown(self) -> str:
        """The title and the table."""
        rows = [
            [name, self.marks[name], *(cell.markdown() for cell in cells)]
            for name, cells in self.rows.items()
        ]
        return f"**{self.title}**\n\n{markdown_table(['model', 'W/U', *self.labels], rows, left=2)}\n"


@dataclass(frozen=True)
class _Column:
    """Values by model and their standard errors."""

    label: str
    values: Values
    errors: Values
    unit: Literal["percent", "perplexity", "plain"] = "percent"
    higher_is_better: bool = True


def make_tables(
    results: Mapping[str, Mapping[str, Any]],
    tasks: Sequence[Task],
    updated: Mapping[str, bool | None],
    dense: str | None,
) -> list[ResultsTable]:
    """Lay out results as in the paper, in a second table length-normalised accuracies, in a third other tasks.

    Args:
        results: By model and task, in the order of the rows (`evaluate_models`).
        tasks: In the order of the columns.
        updated: By model, whether pruning changed the kept weights; None for a dense model.
        dense: The row to compare with; None for no comparison.
    """
    marks = {name: _UPDATED[updated[name]] for name in results}
    competing = [name for name in results if updated[name] is not None and name != dense] or list(results)
    questions = [task for task in tasks if task.kind == "questions"]
    normed = [t for t in questions if any("acc_norm" in metrics[t.name] for metrics in results.values())]
    perplexities = [
        _Column(
            task.label,
            {name: metrics[task.name] for name, metrics in results.items()},
            {},
            "perplexity",
            False,
        )
        for task in tasks
        if task.kind in ("windows", "documents")
    ]
    accuracies = _accuracies(results, questions, "acc")
    titles = ["perplexity ↓"] * bool(perplexities) + ["accuracy in % ↑"] * bool(accuracies)
    tables = []
    for title, columns in (
        (", ".join(titles), perplexities + accuracies),
        ("length-normalised accuracy (acc_norm) in % ↑", _accuracies(results, normed, "acc_norm")),
        ("other tasks; ↑ higher is better, ↓ lower", [c for task in tasks for c in _others(results, task)]),
    ):
        made = [_cells(column, competing, dense) for column in columns]
        rows = {name: [cells[name] for cells in made] for name in results}
        if columns:
            tables.append(ResultsTable(title, [column.label for column in columns], marks, rows))
    return tables


def _accuracies(
    results: Mapping[str, Mapping[str, Any]], tasks: Sequence[Task], metric: str
) -> list[_Column]:
    """A column per task, and their mean where there are several."""
    columns = []
    for task in tasks:
        metrics = {name: found[task.name] for name, found in results.items()}
        values, errors = (
            {name: found.get(key) for name, found in metrics.items()} for key in (metric, f"{metric}_stderr")
        )
        columns.append(_Column(task.label, values, errors))
    if len(tasks) > 1:
        names = [task.name for task in tasks]
        means = {name: average(metrics, names, metric) for name, metrics in results.items()}
        columns.append(_Column("Average", means, {}))
    return columns


def _others(results: Mapping[str, Mapping[str, Any]], task: Task) -> list[_Column]:
    """A column for every shown metric of a harness task, and every filter of it."""
    figures = {name: found[task.name] for name, found in results.items()}
    keys = dict.fromkeys(key for found in figures.values() for key in found) if task.shown else ()
    columns = []
    for key in keys:
        metric, _, filtered = key.partition(",")
        if metric in task.shown:
            error = f"{metric}_stderr" + (f",{filtered}" if filtered else "")
            values, errors = ({name: found.get(k) for name, found in figures.items()} for k in (key, error))
            better, unit = task.shown[metric], _unit(metric)
            head = f"{key}{' %' if unit == 'percent' else ''} {'↑' if better else '↓'}"
            # The column's head breaks at plain spaces.
            label = f"{task.label} {head.replace(' ', _NO_BREAK)}"
            columns.append(_Column(label, values, errors, unit, better))
    return columns


def _unit(metric: str) -> Literal["percent", "perplexity", "plain"]:
    """Accuracies are fractions of 1, in whatever words the name has them; of other scales nothing is known."""
    if "perplexity" in metric:
        return "perplexity"
    return "percent" if metric == "exact_match" or "acc" in metric.split("_") else "plain"


def average(metrics: Mapping[str, Any], names: Sequence[str], metric: str) -> float | None:
    """The mean of a metric over tasks; None if a task lacks it."""
    values = [metrics[name].get(metric) for name in names]
    return None if None in values else sum(values) / len(values)


def _cells(column: _Column, competing: Sequence[str], dense: str | None) -> dict[str, Cell]:
    base = None if dense is None else column.values[dense]
    ranks = _ranks({name: column.values[name] for name in competing}, column.higher_is_better)
    scale, digits = (1, 4) if column.unit == "plain" else (100, 2)
    cells = {}
    for name, value in column.values.items():
        if value is None:
            cells[name] = Cell()
            continue
        delta = _delta(value, base, column.unit, scale, digits) if base is not None and name != dense else ""
        error = column.errors.get(name)
        notes = (delta, "" if error is None else f"±{scale * error:.{digits}f}")
        text = spell_perplexity(value) if column.unit == "perplexity" else f"{scale * value:.{digits}f}"
        cells[name] = Cell(text, ranks.get(name, ""), tuple(filter(None, notes)))
    return cells


def _ranks(values: Values, higher_is_better: bool) -> dict[str, Rank]:
    """The best and the second best value; rows with equal values share their rank."""
    known = {name: value for name, value in values.items() if value is not None and not math.isnan(value)}
    if len(known) < 2:
        return {}
    ordered = sorted(set(known.values()), reverse=higher_is_better)
    ranks: dict[float, Rank] = dict(zip(ordered, ("best", "second"), strict=False))
    return {name: ranks[value] for name, value in known.items() if value in ranks}


def _delta(value: float, base: float, unit: str, scale: int, digits: int) -> str:
    if unit != "perplexity":
        difference = scale * (value - base)
        return f"{'−' if difference < 0 else '+'}{abs(difference):.{digits}f}"
    ratio = value / base
    if not math.isfinite(ratio) or ratio == 0:  # nothing can be said against an infinite perplexity
        return ""
    return f"×{ratio:.2f}" if ratio < 100 else f"×{ratio:.0f}" if ratio < 1e5 else f"×{ratio:.0e}"


def spell_perplexity(value: float) -> str:
    """Two digits after the point, fewer where they mean nothing."""
    if not math.isfinite(value) or value < 1000:
        return f"{value:.2f}"
    return f"{value:,.0f}" if value < 1e5 else f"{value:.1e}"
