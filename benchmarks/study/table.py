"""The table of a study: a row per pattern, number of tokens and method, over its seeds.

Times are not in it: cells may have run at different times, beside other work. `--cost` is for them.
"""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any, Final

from benchmarks.study.cells import Cell
from roi_lightning.utils.tables import markdown_table

_TITLES: Final = {"held_out": "held-out", "wikitext2": "WikiText-2", "openstax_validation": "OpenStax"}


def make_rows(
    cells: Sequence[Cell],
    results: Mapping[str, Mapping[str, Any]],
    references: Mapping[str, Mapping[str, Any]],
    texts: Sequence[str],
) -> list[dict[str, Any]]:
    """What the table says; a value that was measured for several seeds is `{"mean", "min", "max"}`.

    Args:
        cells: All that were to be run.
        results: By a cell's name; a cell without one has failed.
        references: `dense`, and a prior by its pattern.
        texts: What was measured at the end, besides held-out text.
    """
    rows: list[dict[str, Any]] = []
    for name, measured in references.items():
        which = {"method": "dense"} if name == "dense" else {"pattern": name, "method": "prior"}
        rows.append(which | {key: over_seeds([measured[key]]) for key in ("held_out", *texts)})
    return rows + [_learned(group, results, texts) for group in _groups(cells)]


def over_seeds(values: Sequence[float | None]) -> dict[str, float] | None:
    """Mean and range of what is known."""
    known = [float(value) for value in values if value is not None]
    return {"mean": fmean(known), "min": min(known), "max": max(known)} if known else None


def _groups(cells: Sequence[Cell]) -> list[list[Cell]]:
    groups: dict[tuple[str, int, str], list[Cell]] = {}
    for cell in cells:
        groups.setdefault((cell.pattern, cell.tokens, cell.method.name), []).append(cell)
    return list(groups.values())


def _learned(
    cells: Sequence[Cell], results: Mapping[str, Mapping[str, Any]], texts: Sequence[str]
) -> dict[str, Any]:
    first, done = cells[0], [results[cell.name] for cell in cells if cell.name in results]
    row = {"pattern": first.pattern, "tokens": first.tokens, "method": first.method.name}
    row |= {"seeds": len(done), "failed": len(cells) - len(done)}
    if done:
        row["learned_ratio"] = done[0]["learned"] / done[0]["prunable"]
        row["held_out"] = over_seeds([_last(result) for result in done])
        measured = (*texts, "differs_from_prior", "seconds_per_step", "peak_rss_bytes")
        row |= {key: over_seeds([result[key] for result in done]) for key in measured}
    return row


def _last(result: Mapping[str, Any]) -> float | None:
    return result["curve"][-1][1] if result["curve"] else None


def as_markdown(rows: Sequence[Mapping[str, Any]], notes: Sequence[str], texts: Sequence[str]) -> str:
    """The table, and the notes below it."""
    measured = ("held_out", *texts)
    titles = [_TITLES.get(text, text) for text in measured]
    head = ["pattern", "tokens", "method", "seeds", "learned ÷ prunable", *titles, "differs from prior"]
    lines = [_line(row, measured) for row in rows]
    return markdown_table(head, lines, left=3) + "\n" + "".join(f"\n- {note}" for note in notes)


def _line(row: Mapping[str, Any], texts: Sequence[str]) -> list[str]:
    return [
        row.get("pattern", ""),
        f"{row['tokens']:,}" if "tokens" in row else "",
        row["method"],
        _seeds(row),
        one(row.get("learned_ratio"), "{:.3g}"),
        *(_spread(row.get(text), "{:,.2f}") for text in texts),
        _spread(row.get("differs_from_prior"), "{:.2%}"),
    ]


def _seeds(row: Mapping[str, Any]) -> str:
    if not row.get("failed"):
        return str(row.get("seeds", ""))
    return f"{row['seeds']} ({row['failed']} failed)" if row["seeds"] else "failed"


def one(value: float | None, form: str) -> str:
    """A number, or nothing."""
    return "" if value is None else form.format(value)


def _spread(value: Mapping[str, float] | None, form: str) -> str:
    if value is None:
        return ""
    low, mean, high = (form.format(value[key]) for key in ("min", "mean", "max"))
    return mean if value["min"] == value["max"] else f"{mean} ({low}–{high})"
