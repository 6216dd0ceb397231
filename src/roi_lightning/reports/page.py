"""One HTML file that shows what a run did; it loads nothing."""

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from math import isclose, log
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from jinja2 import TemplateError

from roi_lightning.errors import UserError, near_folder, reason
from roi_lightning.learning.run_folder import BEFORE, LOGS, MASK, REPORT, SUMMARY
from roi_lightning.masks.mask_set import MaskSet
from roi_lightning.utils.atomic_io import check_writable, written_aside
from roi_lightning.utils.tables import SUMMARY_HEAD, summary_rows

if TYPE_CHECKING:
    from matplotlib.figure import Figure

GENERATOR: Final = '<meta name="generator" content="roi_lightning report">'
_LOSS: Final = {"train/loss": "training text", "val/nll": "held-out text"}
_SETTLED: Final = {"mask/settled": "settled share of groups", "mask/entropy": "entropy of a pick"}
Curve = list[tuple[int, float]]


@dataclass(frozen=True)
class Run:
    """Holds what a run has left; each part is empty or None where the run has not written it.

    Attributes:
        summary: `summary.json`, from `BaselineSummary`.
        facts: `report.json`, from `Report`.
        curves: Of TensorBoard's log, by tag: optimizer steps and values; held-out losses from the prior's on.
        before: The mask before learning.
        learned: The learned mask.
    """

    summary: dict[str, Any]
    facts: dict[str, Any]
    curves: dict[str, Curve]
    before: MaskSet | None
    learned: MaskSet | None


class Picture(NamedTuple):
    """A figure of the page.

    Attributes:
        title: What stands above.
        note: How to read it; also read aloud in its place.
        source: An SVG as a data URI.
    """

    title: str
    note: str
    source: str


def write_report(folder: Path, out: Path) -> None:
    """Write the page of a run, which may still go on; an earlier page is replaced.

    Raises:
        UserError: If there is nothing to report, or `out` is another file or can't be written.
    """
    check_writable(out)
    if out.exists() and GENERATOR not in out.read_text(encoding="utf-8", errors="replace"):
        raise UserError(f"{str(out)!r} exists and is no report; remove it, or give another path")
    try:
        content = render(read_run(folder), str(folder))
    except UserError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, TemplateError) as error:
        raise UserError(f"{SUMMARY} or {REPORT} in {folder} is damaged ({reason(error)}); move it") from error
    with written_aside(out) as partial:
        partial.write_text(content, encoding="utf-8")


def render(run: Run, folder: str) -> str:
    """Make the page.

    Args:
        run: What it shows.
        folder: Where that lies, for the title of a run that has not finished.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("roi_lightning.reports"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    title = "{method} on {model} at {pattern}".format(**run.facts) if run.facts else folder
    return environment.get_template("page.html").render(
        generator=GENERATOR,
        title=title,
        sentences=sentences(run),
        settings=run.facts.get("settings", {}),
        head=SUMMARY_HEAD,
        rows=summary_rows(run.summary) if run.summary else [],
        pictures=_pictures(run),
        continuations=run.facts.get("continuations", []),
        missing=_missing(run),
    )


def sentences(run: Run) -> list[str]:
    """Say what was done, what it took, and what came of it."""
    facts, summary = run.facts, run.summary
    said = []
    if facts:
        begun = f", starting from the mask {facts['prior']}" if facts["prior"] else ""
        said.append(
            "{learner} learned on {layers} layers of {model} at {pattern}".format(**facts) + f"{begun}."
        )
        text = f" on {facts['tokens']:,} tokens of {facts['text']}" if "tokens" in facts else ""
        last = " since it resumed" if summary.get("resumed") else ""
        seconds = f" in {timedelta(seconds=round(summary['seconds']))} h{last}" if summary else ""
        said.append(
            f"It made {facts['steps']:,} optimizer steps{text}{seconds}, on {facts['devices']} × {facts['device']}."
        )
    if summary:
        said.append(_outcome(summary["perplexity"]))
    if facts and run.before and run.learned and run.learned.overlap(run.before).all == 1:
        said.append(f"No weight changed places: the mask is that of {facts['before']}.")
    return said or ["The run has not finished; the page shows what there is of it."]


def _outcome(perplexity: Mapping[str, float]) -> str:
    dense, *others, learned = perplexity
    ratio = perplexity[learned] / perplexity[dense]
    beside = "; ".join(f"that of {name} is {perplexity[name]:,.2f}" for name in others)
    return (
        f"On held-out text the perplexity of {learned} is {perplexity[learned]:,.2f}, {ratio:.2f} times the dense "
        f"model's {perplexity[dense]:,.2f}; {beside}."
    )


def _pictures(run: Run) -> list[Picture]:
    from roi_lightning.reports.curves import curves_figure

    pictures = []
    for title, y, labels in (("Loss", "nats per token", _LOSS), ("How settled the mask is", "", _SETTLED)):
        curves = {label: run.curves[tag] for tag, label in labels.items() if tag in run.curves}
        if curves:
            note = "; ".join(
                f"{x}: {c[0][1]:.3g} at first, {c[-1][1]:.3g} at last" for x, c in curves.items()
            )
            pictures.append(_picture(title, f"{note}.", curves_figure(curves, y)))
    if run.facts and run.before and run.learned:
        pictures += _changes(run.facts["before"], run.before, run.facts["method"], run.learned)
    return pictures


def _changes(before: str, mask: MaskSet, method: str, learned: MaskSet) -> list[Picture]:
    from roi_lightning.reports.corners import mask_figure
    from roi_lightning.reports.curves import changed_figure, changed_shares

    overlap = learned.overlap(mask)
    if overlap.all == 1:  # recovery trains weights under a mask that stays
        return []
    new = sum(overlap.kept.values()) - sum(overlap.both.values())
    note = f"{new:,} kept weights are new beside {before}, {1 - overlap.all:.2%}; here by layer."
    changed = sorted((share, name) for name, share in overlap.layers.items() if share < 1)
    pieces = mask_figure({before: mask, method: learned}, before, [x for _, x in changed[:3]], changed=True)
    return [
        _picture("What learning changed", note, changed_figure(changed_shares(overlap))),
        _picture(
            "Where the mask changed most", "In the layers that changed most; dots: changed weights.", pieces
        ),
    ]


def _picture(title: str, note: str, figure: "Figure") -> Picture:
    from roi_lightning.reports.style import to_svg

    return Picture(title, note, f"data:image/svg+xml;base64,{base64.b64encode(to_svg(figure)).decode()}")


def _missing(run: Run) -> list[str]:
    """Say what the page can't show, and which callback or logger brings it."""
    needed: dict[str, Any] = {
        "perplexities: BaselineSummary writes them when a run ends": run.summary,
        "settings, continuations and the mask before learning: Report writes them when a run ends": run.facts,
        "the learned mask: HardenMasks writes it when a run ends": run.learned,
        "curves: TensorBoard's log has them": run.curves,
    }
    return [line for line, found in needed.items() if not found]


def read_run(folder: Path) -> Run:
    """Read what a run has left.

    Args:
        folder: Of the run, which may still go on.

    Raises:
        UserError: If there is nothing, or a file is damaged.
    """
    if not folder.is_dir():
        raise UserError(f"no folder {str(folder)!r}; give that of a run, runs/NAME{near_folder(folder)}")
    run = Run(
        _read_json(folder / SUMMARY),
        _read_json(folder / REPORT),
        _read_curves(folder),
        *(MaskSet.load(folder / name) if (folder / name).exists() else None for name in (BEFORE, MASK)),
    )
    if not (run.summary or run.facts or run.curves or run.learned):
        raise UserError(
            f"{str(folder)!r} has nothing to report; give the folder of a run with the callback Report"
        )
    if run.summary and run.facts.get("prior") and (losses := run.curves.get("val/nll")):
        *_, prior, learned = run.summary["perplexity"].values()
        if isclose(losses[-1][1], log(learned), abs_tol=1e-3):  # of the same text
            losses.insert(0, (0, log(prior)))
    return run


def _read_json(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return content


def _read_curves(folder: Path) -> dict[str, Curve]:
    """Read all legs of a run that was resumed; where two have a step, the later counts."""
    if not any(folder.glob(LOGS)):
        return {}
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), {"scalars": 0}).Reload()
    return {
        tag: sorted({event.step: event.value for event in events.Scalars(tag)}.items())
        for tag in events.Tags()["scalars"]
    }
