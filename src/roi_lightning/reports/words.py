"""What a page says in sentences: what was done, what is missing, how figures were measured."""

from collections.abc import Mapping, Sequence

from roi_lightning.masks.layer_patterns import is_mixed
from roi_lightning.masks.pattern import NMPattern
from roi_lightning.reports.curves import spell_perplexity
from roi_lightning.reports.facts import duration_of, machine_of, prior_of, seconds_of, text_of, tokens_of
from roi_lightning.reports.run_files import RECORD, REPORT, SUMMARY
from roi_lightning.reports.sources import Mask, Sources


def lead(sources: Sources) -> list[str]:
    """Three sentences: what was done, with what, and what came of it."""
    masks = sources.masks
    if masks:
        return _lead_of_one(masks[0]) if len(masks) == 1 else _lead_of_several(masks)
    measured = [f"{one.path} measures {', '.join(one.content['models'])}." for one in sources.evaluations]
    return measured + [
        f"{one.path} compares {', '.join(one.content['masks'])}." for one in sources.comparisons
    ]


def _lead_of_one(mask: Mask) -> list[str]:
    learned = mask.kind == "run" or "learner" in mask.training
    verb = "learned" if learned and mask.status == "finished" else "was learning" if learned else "chose"
    layers = len(mask.sidecar.get("layers", ())) or mask.run.get("layers")
    where = f" of {layers:,} linear layers" if layers else ""
    prior = prior_of(mask)
    begun = f", starting from the {prior} mask" if learned and prior else ""
    sentences = [f"{mask.method} {verb} which weights of {mask.model} to keep: {_kept(mask)}{where}{begun}."]
    work = " on ".join(part for part in (_steps(mask), _text(mask)) if part)
    time = " on ".join(part for part in (duration_of(mask), machine_of(mask).get("device")) if part)
    if work or time:
        sentences.append(f"It took {': '.join(part for part in (work, time) if part)}.")
    return [*sentences, headline(mask)]


def _kept(mask: Mask) -> str:
    if is_mixed(mask.pattern):
        share = f", {mask.mixed['kept'] / mask.mixed['prunable']:.1%} of the weights" if mask.mixed else ""
        return f"mixed patterns ({mask.pattern}){share}"
    if mask.pattern == "N:M" or ":" not in mask.pattern:
        return "some of its weights"
    pattern = NMPattern(mask.pattern)
    return f"{pattern.n} of every {pattern.m} consecutive weights"


def headline(mask: Mask) -> str:
    """The perplexities in a sentence, or that there are none."""
    found = mask.summary.get("perplexity")
    if not found:
        held_out = mask.sidecar.get("perplexity", {}).get("held-out")
        if held_out is not None:
            value = spell_perplexity(float(held_out))
            return f"On held-out text its perplexity is {value}; the dense model's was not measured."
        return "How good the mask is was not measured here."
    learned, dense = float(found[mask.learned]), float(found["dense"])
    others = [
        f"{spell_perplexity(float(value))} with the {name} mask"
        for name, value in found.items()
        if name not in ("dense", mask.learned)
    ]
    beside = f"; without learning it is {' and '.join(others)}" if others else ""
    return (
        f"On held-out text the perplexity goes from {spell_perplexity(dense)} (dense) to "
        f"{spell_perplexity(learned)} (learned), {_times(learned, dense)}{beside}."
    )


def _lead_of_several(masks: Sequence[Mask]) -> list[str]:
    models = list(dict.fromkeys(f"{mask.model} at {mask.pattern}" for mask in masks))
    sentences = [f"Side by side: {', '.join(mask.name for mask in masks)}."]
    sentences.append(f"All are of {models[0]}." if len(models) == 1 else f"They are of {', '.join(models)}.")
    if len({mask.pattern for mask in masks}) > 1 and any(is_mixed(mask.pattern) for mask in masks):
        sentences.append("Mixed patterns are a class of their own: one N:M for all layers asks for more.")
    found = {m.name: (m.summary["perplexity"], m.learned) for m in masks if m.summary.get("perplexity")}
    if found:
        dense = {name: float(values["dense"]) for name, (values, _) in found.items()}
        learned = {name: float(values[own]) for name, (values, own) in found.items()}
        sentences.append(
            _on_one_text(learned, dense) if len(set(dense.values())) == 1 else _ratios(learned, dense)
        )
    return sentences


def _on_one_text(learned: Mapping[str, float], dense: Mapping[str, float]) -> str:
    best, worst = min(learned, key=lambda x: learned[x]), max(learned, key=lambda x: learned[x])
    text = f"The lowest perplexity on held-out text is {spell_perplexity(learned[best])}, of {best}"
    text += f"; the dense model has {spell_perplexity(next(iter(dense.values())))}"
    if worst != best:
        text += f", and the highest is {spell_perplexity(learned[worst])}, of {worst}"
    return f"{text}."


def _ratios(learned: Mapping[str, float], dense: Mapping[str, float]) -> str:
    ratio = {name: learned[name] / dense[name] for name in learned}
    best, worst = min(ratio, key=lambda x: ratio[x]), max(ratio, key=lambda x: ratio[x])
    return (
        "They were measured on different held-out texts, so compare perplexities only by their ratio to the dense "
        f"model's on the same text: it is lowest for {best}, {ratio[best]:.3g}, and highest for {worst}, "
        f"{ratio[worst]:.3g}."
    )


def _times(value: float, dense: float) -> str:
    return f"{value / dense:.3g} times as much"


def _steps(mask: Mask) -> str:
    plural = "" if mask.last_step == 1 else "s"
    return f"{mask.last_step:,} optimizer step{plural}" if mask.last_step else ""


def _text(mask: Mask) -> str:
    tokens, source = tokens_of(mask), text_of(mask)
    return f"{tokens:,} tokens of {source}" if tokens and source else ""


def missing(masks: Sequence[Mask]) -> list[str]:
    """What a page can't show, and what would bring it; where there are several masks, of which."""
    lines: dict[str, list[str]] = {}
    for mask in masks:
        for line in _missing(mask):
            lines.setdefault(line, []).append(mask.name)
    several = len(masks) > 1
    return [
        f"{', '.join(names)}: {line}" if several else f"{line[0].upper()}{line[1:]}"
        for line, names in lines.items()
    ]


def _missing(mask: Mask) -> list[str]:
    if mask.kind == "export":
        return [
            "a directory without a run: no curves, no machine; give the folder of the run if fit made it."
        ]
    lines = []
    if mask.record is None:
        lines.append(f"no {RECORD}, as of earlier versions: no curves, machine, versions or command.")
    if mask.status != "finished":
        return [
            *lines,
            "perplexities, the mask's story, continuations and the export are written when a run finishes.",
        ]
    if not mask.summary:
        lines.append(
            f"no {SUMMARY}: add BaselineSummary to trainer.callbacks for perplexities beside dense and baselines."
        )
    if not mask.report:
        lines.append(f"no {REPORT}: add Report to trainer.callbacks for the mask's story and continuations.")
    if mask.export is None:
        lines.append("no export: add SparseExport to trainer.callbacks, or use roi-lightning export.")
    return lines


def how(sources: Sources) -> list[str]:
    """How the figures of a page were measured."""
    masks = sources.masks
    lines = []
    held_out = {
        mask.name: mask.summary["held_out_tokens"] for mask in masks if mask.summary.get("held_out_tokens")
    }
    if held_out:
        counts = set(held_out.values())
        tokens = (
            f"{counts.pop():,}"
            if len(counts) == 1
            else ", ".join(f"{n:,} ({k})" for k, n in held_out.items())
        )
        lines.append(
            f"Perplexity: exp of the mean loss per predicted token, over {tokens} held-out tokens that no mask was "
            "learned from, in windows as long as in training. Magnitude and the prior are measured on the same text, "
            "in the same process. Text that settings were chosen on flatters them."
        )
    if any(mask.record for mask in masks):
        lines.append(
            "Curves: what the run recorded. Of more than 300 points as many are drawn that no peak is lost; in words "
            "and tables are the recorded values. Of steps that were run twice, the later leg counts."
        )
        lines.append("Entropy and settled groups: of a sample of the logits. Flips: of all weights.")
    if any(mask.report.get("mask") for mask in masks):
        lines.append("Overlap: weights kept by both masks ÷ weights kept. Two unrelated N:M masks share N/M.")
    if any(mask.report.get("continuations") for mask in masks):
        lines.append(
            "Continuations: a few prompts show what figures do not, and prove nothing. Models may write what is "
            "untrue or offensive."
        )
    if sources.evaluations:
        lines.append(
            "Evaluation: as evaluate measured it, with the settings below its table. ± is the standard error of the "
            "metric, × the ratio and +/− the difference to the dense model, the latter in points."
        )
    if sources.comparisons:
        lines.append("Overlap of masks: as compare measured it: weights kept by both ÷ weights kept.")
    if any(seconds_of(mask) for mask in masks):
        lines.append(
            "Times: by the clock of the machine above, all legs of a run together where they have ended."
        )
    return lines
