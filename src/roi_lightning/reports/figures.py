"""Figures of masks as tables for a page: perplexities, changes by layer, overlaps, results of `evaluate`."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from roi_lightning.masks.overlap import Overlap, place_of
from roi_lightning.reports.curves import spell_perplexity
from roi_lightning.reports.sources import Mask, Results

_ACCURACIES: Final = ("acc", "acc_norm", "exact_match", "f1", "em")


@dataclass(frozen=True)
class Cell:
    """A value.

    Attributes:
        text: To show.
        note: Below it: a ratio, a difference, a standard error.
        share: From 0 to 1, drawn as a bar or a shade; None for neither.
        title: What a pointer shows.
    """

    text: str
    note: str = ""
    share: float | None = None
    title: str = ""


@dataclass(frozen=True)
class Table:
    """A table whose rows begin with their names.

    Attributes:
        caption: What it holds.
        head: Of the columns, that of the names among them.
        rows: Name and cells.
        kind: How shares are drawn: "bars" or "heat"; "plain" for not at all.
        note: How to read it.
    """

    caption: str
    head: list[str]
    rows: list[tuple[str, list[Cell]]]
    kind: str = "plain"
    note: str = ""


@dataclass(frozen=True)
class Corner:
    """The top-left corner of a layer before and after.

    Attributes:
        layer: Its name.
        before: Rows of cells: 1 kept, 0 pruned.
        after: Likewise.
        newly_kept: Cells, (row, column).
        newly_pruned: Likewise.
    """

    layer: str
    before: list[str]
    after: list[str]
    newly_kept: list[tuple[int, int]] = field(default_factory=list)
    newly_pruned: list[tuple[int, int]] = field(default_factory=list)

    @property
    def cells(self) -> int:
        """How many there are."""
        return sum(map(len, self.after))


@dataclass(frozen=True)
class Perplexity:
    """A row of the chart and of the table of perplexities.

    Attributes:
        label: To show.
        value: The perplexity.
        dense: The dense model's on the same text.
        zeros: Fraction among the weights of masked layers, and among all of the model; None if not known.
        number: Of the run whose learned mask it is, from 1 on; 0 for others.
    """

    label: str
    value: float
    dense: float
    zeros: tuple[float | None, float | None]
    number: int


def perplexities(masks: Sequence[Mask]) -> list[Perplexity]:
    """Of the dense model, of baselines, and of what was learned; what runs have in common is one row.

    Where runs were measured on different texts, which the dense model's perplexities tell, the rows in common say
    whose they are.
    """
    common: dict[tuple[str, str], Perplexity] = {}
    owners: dict[tuple[str, str], list[str]] = {}
    learned = []
    for number, mask in enumerate(masks, start=1):
        found = {name: float(value) for name, value in (mask.summary.get("perplexity") or {}).items()}
        zeros = mask.summary.get("zeros", {})
        for name, value in found.items():
            fractions = (0.0, 0.0) if name == "dense" else (zeros.get("prunable"), zeros.get("model"))
            if name == mask.learned:
                label = f"{name}, learned" if len(masks) == 1 else mask.name
                learned.append(Perplexity(label, value, found["dense"], fractions, number))
            else:
                key = name, spell_perplexity(value)
                common.setdefault(key, Perplexity(name, value, found["dense"], fractions, 0))
                owners.setdefault(key, []).append(mask.name)
    if len({spell_perplexity(row.dense) for row in common.values()}) > 1:
        common = {
            key: replace(row, label=f"{row.label}: {', '.join(owners[key])}") for key, row in common.items()
        }
    return [*common.values(), *learned]


def perplexity_table(rows: Sequence[Perplexity]) -> Table:
    """Perplexities, their ratios to the dense model's, and zeros."""
    head = ["mask", "perplexity", "÷\N{NO-BREAK SPACE}dense", "zeros in its layers", "zeros in the model"]
    cells = [
        (
            row.label,
            [Cell(spell_perplexity(row.value)), Cell(_ratio(row.value, row.dense)), *map(_zeros, row.zeros)],
        )
        for row in rows
    ]
    return Table("Lower perplexities are better", head, cells)


def _zeros(share: float | None) -> Cell:
    return Cell("–" if share is None else _percent(share))


def _ratio(value: float, dense: float) -> str:
    ratio = value / dense if dense else math.nan
    return f"×{ratio:,.2f}" if ratio < 1000 else f"×{ratio:,.0f}" if math.isfinite(ratio) else "–"


def _percent(share: float) -> str:
    return f"{100 * share:.1f}\N{NO-BREAK SPACE}%"


def changed_table(mask: Mask) -> Table | None:
    """Share of the kept weights that the reference does not keep: a row per block, a column per kind of layer."""
    changed = mask.report.get("mask", {}).get("changed")
    if not changed:
        return None
    kept: dict[tuple[int, str], int] = {}
    both: dict[tuple[int, str], int] = {}
    for name, counts in changed.items():
        place, block = place_of(name)
        key = (block, place.rpartition(".")[2])
        kept[key] = kept.get(key, 0) + counts["kept"]
        both[key] = both.get(key, 0) + counts["both"]
    shares = {key: 1 - both[key] / kept[key] for key in kept}
    top = max(shares.values()) or 1.0
    kinds = list(dict.fromkeys(kind for _, kind in shares))
    rows = [
        (str(block), [_heat(shares.get((block, kind)), f"{kind} of block {block}", top) for kind in kinds])
        for block in sorted({block for block, _ in shares})
    ]
    overlap = Overlap({n: c["both"] for n, c in changed.items()}, {n: c["kept"] for n, c in changed.items()})
    by_kind = {kind: 1 - share for kind, share in overlap.kinds.items()}
    rows.append(("all", [_heat(by_kind.get(kind), f"all {kind}", top) for kind in kinds]))
    reference = mask.report["mask"]["reference"]
    caption = f"Kept weights that the {reference} mask does not keep, in percent"
    note = f"{_percent(1 - overlap.all)} of all kept weights. The darkest shade is {_percent(top)}."
    return Table(caption, ["block", *_short(kinds)], rows, "heat", note)


def _heat(share: float | None, what: str, top: float) -> Cell:
    if share is None:
        return Cell("–")
    digits = 1 if top >= 0.1 else 2
    return Cell(f"{100 * share:.{digits}f}", "", share / top, f"{what}: {100 * share:.2f} %")


def overlap_table(masks: Sequence[Mask]) -> Table | None:
    """How much of what a mask keeps others keep too."""
    found = [(mask, mask.report.get("mask", {}).get("overlap") or {}) for mask in masks]
    several = sum(bool(overlaps) for _, overlaps in found) > 1
    kinds = list(dict.fromkeys(kind for _, o in found for other in o.values() for kind in other["kinds"]))
    rows = [
        (
            f"{mask.name}: {other}" if several else other,
            [_bar(values["all"]), *(_bar(values["kinds"].get(kind)) for kind in kinds)],
        )
        for mask, overlaps in found
        for other, values in overlaps.items()
    ]
    head = ["mask", "all", *_short(kinds)]
    return Table("Kept weights that another mask keeps too, in percent", head, rows, "bars") if rows else None


def _short(kinds: Sequence[str]) -> list[str]:
    """Without the `_proj` of `q_proj` and the like, so that tables fit a phone."""
    return [kind.removesuffix("_proj") for kind in kinds]


def _bar(share: float | None) -> Cell:
    return Cell("–") if share is None else Cell(f"{100 * share:.1f}", "", share)


def corners(mask: Mask) -> list[Corner]:
    """The corners that a run has kept."""
    found = []
    for entry in mask.report.get("mask", {}).get("corners") or ():
        corner = Corner(entry["layer"].removesuffix(".weight"), entry["before"], entry["after"])
        for row, (before, after) in enumerate(zip(corner.before, corner.after, strict=True)):
            for column, (was, now) in enumerate(zip(before, after, strict=True)):
                if was != now:
                    (corner.newly_kept if now == "1" else corner.newly_pruned).append((row, column))
        found.append(corner)
    return found


def evaluation_table(results: Results) -> Table:
    """What `evaluate` measured: a row per model, a column per metric, with errors and what differs from dense."""
    models, dense = results.content["models"], results.content["settings"].get("dense")
    metrics = {name: _flat(tasks) for name, tasks in models.items()}
    columns = list(dict.fromkeys(key for found in metrics.values() for key in found))
    columns.sort(key=lambda key: (not key[0].endswith("perplexity"), key[0] == "average"))
    fractions = {
        key for key in columns if _are_fractions(key, [found.get(key) for found in metrics.values()])
    }
    rows = [
        (
            f"{name} (dense)" if name == dense else name,
            [
                _measured(key, found, metrics.get(dense) if name != dense else None, key in fractions)
                for key in columns
            ],
        )
        for name, found in metrics.items()
    ]
    head = ["model", *(_column(key, key in fractions) for key in columns)]
    return Table(f"Results of evaluate, from {results.path.name}", head, rows)


def _flat(tasks: Mapping[str, Any]) -> dict[tuple[str, str], tuple[float, float | None]]:
    """Value and standard error by task and metric."""
    flat = {}
    for task, value in tasks.items():
        for metric, number in value.items() if isinstance(value, Mapping) else [("", value)]:
            if metric.endswith("_stderr") or not _is_number(number):
                continue
            error = value.get(f"{metric}_stderr") if metric else None
            flat[task, metric] = (
                float(number),
                None if error is None or not _is_number(error) else float(error),
            )
    return flat


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) or value in ("nan", "inf", "-inf")


def _are_fractions(key: tuple[str, str], values: Sequence[tuple[float, float | None] | None]) -> bool:
    in_range = all(0 <= value[0] <= 1 for value in values if value is not None)
    return in_range and "perplexity" not in key[0] and "perplexity" not in key[1]


def _column(key: tuple[str, str], fraction: bool) -> str:
    name = " ".join(part for part in key if part).replace("_", " ")
    return f"{name}, %" if fraction else name


def _measured(
    key: tuple[str, str],
    found: Mapping[tuple[str, str], tuple[float, float | None]],
    dense: Mapping[tuple[str, str], tuple[float, float | None]] | None,
    fraction: bool,
) -> Cell:
    if key not in found:
        return Cell("–")
    value, error = found[key]
    notes = []
    if dense is not None and key in dense and math.isfinite(value):
        base = dense[key][0]
        notes.append(f"{100 * (value - base):+.2f}".replace("-", "−") if fraction else _ratio(value, base))
    if error is not None:
        notes.append(f"±{100 * error if fraction else error:.2f}")
    return Cell(f"{100 * value:.2f}" if fraction else spell_perplexity(value), " ".join(notes))


def comparison_table(results: Results) -> Table:
    """What `compare` measured: every pair, overall and by kind of layer."""
    pairs = results.content["overlap"]
    kinds = list(dict.fromkeys(kind for pair in pairs for kind in pair["kinds"]))
    rows = [
        (
            f"{pair['a']} and {pair['b']}",
            [_bar(pair["all"]), *(_bar(pair["kinds"].get(kind)) for kind in kinds)],
        )
        for pair in pairs
    ]
    pattern = results.content.get("pattern", "")
    caption = f"Weights that both {pattern} masks keep ÷ weights kept, in percent, from {results.path}"
    return Table(caption, ["masks", "all", *_short(kinds)], rows, "bars")


@dataclass(frozen=True)
class Story:
    """What became of a run's mask.

    Attributes:
        name: Of the run.
        reference: What it is compared with, cell by cell.
        corners: Of some layers.
        changed: By layer and kind; None if that was not recorded.
        skipped: By mask, why its overlap could not be computed.
    """

    name: str
    reference: str
    corners: list[Corner]
    changed: Table | None
    skipped: Mapping[str, str]


def story(mask: Mask) -> Story:
    """What became of the mask of a run that has a report."""
    found = mask.report["mask"]
    return Story(
        mask.name, found["reference"], corners(mask), changed_table(mask), found.get("skipped") or {}
    )


@dataclass(frozen=True)
class Continuation:
    """What models say after a prompt.

    Attributes:
        prompt: What they were given.
        source: Where it is from.
        expected: How the text goes on there; None for a prompt that was given.
        answers: Name of a model and what it wrote.
    """

    prompt: str
    source: str
    expected: str | None
    answers: list[tuple[str, str]]


def continuations(masks: Sequence[Mask]) -> list[Continuation]:
    """What dense, prior and learned models write, by prompt; what two runs write alike stands there once."""
    several = len(masks) > 1
    found: dict[str, Continuation] = {}
    for mask in masks:
        for entry in mask.report.get("continuations") or ():
            prompt = str(entry["prompt"])
            kept = found.setdefault(prompt, Continuation(prompt, entry["source"], entry.get("expected"), []))
            for name, text in entry["answers"].items():
                shared = (name, text)
                if name == "dense" and shared in kept.answers:
                    continue
                label = f"{mask.name}: {name}" if several and name != "dense" else name
                kept.answers.append((label, text))
    return list(found.values())
