"""One HTML page about runs and masks that needs nothing but itself: no network, no other file."""

import importlib.metadata
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from roi_lightning.errors import UserError
from roi_lightning.utils.atomic_io import check_writable, written_aside

if TYPE_CHECKING:
    from roi_lightning.reports.curves import Chart
    from roi_lightning.reports.sources import Mask, Sources

GENERATOR: Final = "roi_lightning report"
_META: Final = f'<meta name="generator" content="{GENERATOR}'
_HEAD_BYTES: Final = 2000
# Tag → title, what it means. In the order of the page; tags that are not here follow.
_CURVES: Final = {
    "train/loss": ("Training loss", "Of the text that it learns from, in nats a token."),
    "val/perplexity": ("Held-out perplexity", "Of the hard mask, on text that it does not learn from."),
    "anneal/lambda": ("λ, sampling temperature", "How much the noise counts when a mask is drawn."),
    "anneal/tau": ("τ, softmax temperature", "How close a relaxed pick is to one-hot."),
    "mask/entropy": ("Entropy of picks", "1 is undecided, 0 decided."),
    "mask/settled": ("Settled groups", "Share that another draw would hardly change."),
    "mask/flips": ("Flips", "Share of kept weights that were not kept in the snapshot before."),
    "mask/flips_from_prior": (
        "Flips against the prior",
        "Share of kept weights that the prior does not keep.",
    ),
    "tokens/per_second": ("Tokens per second", "Without validation and snapshots."),
    "memory/peak_gib": ("Peak memory", "In GiB."),
    "lr": ("Learning rate", ""),
}
_NOT_DRAWN: Final = ("epoch", "tokens/seen", "val/nll")


def write_report(
    sources: Sequence[Path],
    out: Path,
    *,
    title: str | None = None,
    prompts: Sequence[str] = (),
    overwrite: bool = False,
) -> None:
    """Write a page about runs, exported directories, and results of `evaluate` and `compare`.

    Args:
        sources: Run folders, exported directories, folders of `compare`, JSON files of `evaluate`.
        out: The HTML file. A page of this function's is replaced.
        title: Of the page; says what was done if left out.
        prompts: Texts to continue by the dense model, the prior and the learned mask of every run.
        overwrite: Whether another file may be replaced.

    Raises:
        UserError: If a source is none of these or damaged, or `out` is another file or can't be written; then
            nothing is written.
    """
    check_replaceable(out, overwrite)
    content = render(sources, title, prompts)
    with written_aside(out) as partial:
        partial.write_text(content, encoding="utf-8")


def check_replaceable(out: Path, overwrite: bool = False) -> None:
    """Refuse to replace a file that is no page of `write_report`.

    Raises:
        UserError: Naming the file and the remedy.
    """
    check_writable(out)
    if overwrite or not out.exists():
        return
    with out.open("rb") as file:
        head = file.read(_HEAD_BYTES)
    if _META.encode() not in head:
        raise UserError(f"{str(out)!r} exists and is no report; give another path, or --overwrite")


def render(sources: Sequence[Path], title: str | None = None, prompts: Sequence[str] = ()) -> str:
    """The page as HTML; arguments and errors as of `write_report`."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    from roi_lightning.reports.curves import dashes
    from roi_lightning.reports.sources import read_sources

    environment = Environment(
        loader=PackageLoader("roi_lightning.reports"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals["dashes"] = dashes
    found = read_sources(sources)
    if prompts:
        from roi_lightning.reports.answers import with_answers

        found = with_answers(found, prompts)
    return environment.get_template("page.html").render(
        title=title or _title(found),
        generator=f"{GENERATOR} {importlib.metadata.version('roi-lightning')}",
        **_words(found),
        **_pictures(found),
    )


def _words(found: "Sources") -> dict[str, Any]:
    from roi_lightning.reports import endings, facts, use, words

    masks = found.masks
    return {
        "lead": words.lead(found),
        "alarms": endings.alarms(masks),
        "legs": [(mask.name, lines) for mask in masks if (lines := endings.legs(mask))],
        "names": [mask.name for mask in masks],
        "facts": facts.fact_rows(masks),
        "settings": facts.settings_rows(masks),
        "missing": words.missing(masks),
        "steps": [(mask.name, use.next_steps(mask)) for mask in masks],
        "how": words.how(found),
    }


def _pictures(found: "Sources") -> dict[str, Any]:
    from roi_lightning.reports import figures
    from roi_lightning.reports.curves import draw_perplexities, number_of_colour

    masks, charts = found.masks, _curves(found.masks)
    rows = figures.perplexities(masks)
    return {
        "perplexities": draw_perplexities("perplexities", [(r.label, r.value, r.number) for r in rows])
        if rows
        else None,
        "perplexity_table": figures.perplexity_table(rows),
        "legend": [(m.name, number_of_colour(i)) for i, m in enumerate(masks, start=1)]
        if len(masks) > 1
        else [],
        "charts": charts,
        "data": {chart.name: chart.data for chart in charts},
        "stories": [figures.story(mask) for mask in masks if mask.report.get("mask")],
        "overlaps": figures.overlap_table(masks),
        "evaluations": [(one, figures.evaluation_table(one)) for one in found.evaluations],
        "comparisons": [figures.comparison_table(one) for one in found.comparisons],
        "continuations": figures.continuations(masks),
        "generation": next((g for m in masks if (g := m.report.get("generation"))), None),
    }


def _title(found: "Sources") -> str:
    if len(found.masks) == 1:
        (mask,) = found.masks
        return f"{mask.method} on {mask.model} at {mask.pattern}"
    if found.masks:
        models = {f"{mask.model} at {mask.pattern}" for mask in found.masks}
        of = models.pop() if len(models) == 1 else f"{len(models)} models"
        return f"{len(found.masks)} masks of {of}"
    return "Masks compared" if found.comparisons else "Models measured"


def _curves(masks: "Sequence[Mask]") -> "list[Chart]":
    """A chart for every quantity that a run has recorded."""
    from roi_lightning.reports.curves import Series, draw_curve

    recorded = dict.fromkeys(tag for mask in masks if mask.record for tag in mask.record.curves)
    tags = [tag for tag in _CURVES if tag in recorded]
    tags += [tag for tag in recorded if tag not in _CURVES and tag not in _NOT_DRAWN]
    charts = []
    for index, tag in enumerate(tags, start=1):
        title, note = _CURVES.get(tag, (tag, ""))
        series = [
            Series(mask.name if len(masks) > 1 else "", mask.record.curves[tag], number)
            for number, mask in enumerate(masks, start=1)
            if mask.record and mask.record.curves.get(tag)
        ]
        legs = sorted({step for mask in masks for step in mask.resumed_at})
        smooth, log = tag.startswith("train/"), tag.endswith("perplexity")
        charts.append(draw_curve(f"chart{index}", title, note, series, legs, smooth=smooth, log=log))
    return charts
