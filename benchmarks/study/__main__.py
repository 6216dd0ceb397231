"""Learning methods side by side: methods × patterns × token budgets × seeds, in one table and one picture.

    python -m benchmarks.study --roi_data FOLDER --out runs/study --methods roi,maskllm,straight_through \\
        --patterns 2:4,2:8 --tokens 307200 --seeds 0,1 --json F.json --markdown F.md --figure F.png

Every cell is a `fit` of the quickstart with `overlays/small_budget.yaml`, the method's own arguments, and what the
study decides for all alike; all cells of a pattern start from one prior mask, where the method takes one (a learner
of your own does if its arguments say `--model.prior OUT/2of4/prior`). FOLDER holds
`corpus/openstax_{train,validation}.jsonl.gz` and `wikitext-2-raw/wiki.test.raw`. What an earlier call left in --out
is kept and a cell that was killed resumes from its last checkpoint: a study can be interrupted.

A method that sets `--data.corpora` learns from that text instead; `--data` options are the study's otherwise.

`--cost` measures nothing but the time and the memory of a few steps of every method.
"""

import argparse
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

from benchmarks.study.cells import METHODS, Cell, Study, choose_methods, in_folders, left_out, make_cells
from benchmarks.study.cost import cost_markdown, cost_rows
from benchmarks.study.references import reference_names, run_references
from benchmarks.study.run import COST_SKIP, cost_recipe, recipe_of, run_cell, run_cost
from benchmarks.study.table import as_markdown, make_rows
from benchmarks.study.work import WorkFailed, check_claim, fetch, put, result_of, sole_user
from roi_lightning.utils.atomic_io import write_json, written_aside


def main(argv: Sequence[str] | None = None) -> int:
    """Run what is missing, then write the table and the picture.

    Returns:
        0, or 1 if a cell failed.
    """
    args = build_parser().parse_args(argv)
    study = Study(**{field.name: getattr(args, field.name) for field in fields(Study)})
    methods = choose_methods(args.methods, args.method)
    cells = make_cells(methods, args)
    notes = left_out(methods, args.patterns.split(","))
    if not cells:
        raise SystemExit(f"error: there is nothing to run: {' '.join(notes)}")
    with sole_user(study.out):
        if study.store:
            for name in [*(cell.name for cell in cells), *reference_names(cells)]:
                fetch(study.store, name, study.out)
        return (_cost if args.cost else _study)(args, study, cells, notes)


def build_parser() -> argparse.ArgumentParser:
    """The options."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.study",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--roi_data", metavar="FOLDER", type=Path, required=True)
    add("--out", type=Path, default=Path("runs/study"))
    known = ",".join(method.name for method in METHODS)
    add("--methods", metavar="NAMES", help=f"of {known}; all if left out")
    add(
        "--method",
        metavar="'NAME=ARGUMENTS'",
        action="append",
        default=[],
        help="one more method: a method to start from, if any, and what to add to the command line of fit; "
        "may be repeated: 'cool=maskllm --model.tau.end 0.03', 'mine=roi --model my_learner.MyLearner'",
    )
    add("--patterns", default="2:4")
    add("--tokens", default="307200", help="to learn from, several with commas (default: %(default)s)")
    add("--seeds", default="0")
    add(
        "--store", type=Path, help="keep results here too, and take those that are here: small files, to move"
    )
    add("--json", type=Path)
    add("--markdown", type=Path)
    add("--figure", type=Path)
    _add_settings(parser.add_argument_group("settings of all cells"))
    cost = parser.add_argument_group("cost")
    cost.add_argument("--cost", action="store_true", help="time and memory of a few steps, nothing else")
    cost.add_argument("--cost_steps", type=int, default=12, help="optimizer steps (default: %(default)s)")
    cost.add_argument("--repeat", type=int, default=2, help="rounds over all methods (default: %(default)s)")
    return parser


def _add_settings(group: "argparse._ArgumentGroup") -> None:
    add = group.add_argument
    add("--lm", default=Study.lm, help="the model (default: %(default)s)")
    for name, text in {
        "seq_len": "tokens of a window",
        "batch_size": "windows of a step",
        "val_windows": "held-out windows",
        "points": "validations of a run, about: they divide its steps",
        "prior_windows": "windows of the prior's text",
        "prior_seq_len": "tokens of each",
        "eval_windows": "windows of the texts measured at the end, 0 for all",
        "eval_seq_len": "tokens of each",
    }.items():
        add(
            f"--{name}",
            metavar="N",
            type=int,
            default=getattr(Study, name),
            help=f"{text} (default: %(default)s)",
        )
    add(
        "--text",
        metavar="NAME=FILE",
        action="append",
        default=[],
        help="one more text to measure at the end; may be repeated",
    )
    add("--keep_checkpoints", action="store_true", help="1.3 GB a cell, else deleted when it is finished")


def _study(args: argparse.Namespace, study: Study, cells: list[Cell], notes: list[str]) -> int:
    for cell in cells:
        check_claim(study.folder(cell), recipe_of(study, cell))
    try:
        references = run_references(study, list(dict.fromkeys(cell.pattern for cell in cells)))
    except WorkFailed as failure:
        raise SystemExit(f"error: the dense model and the priors: {failure}") from None
    if study.store:
        for name in reference_names(cells):
            put(study.store, name, study.out)
    results = _run_all(study, {cell.name: partial(run_cell, study, cell) for cell in cells})
    texts = list(study.texts)
    rows = make_rows(cells, results, references, texts)
    found = {"settings": _options(args), "rows": rows, "references": references, "notes": notes}
    _write(
        args,
        as_markdown(rows, notes, texts),
        found | {"cells": [_short(result) for result in results.values()]},
    )
    if args.figure:
        from benchmarks.study.figure import (
            draw_study,  # imports torch, and what we hold counts as held by a child
        )

        title = f"{Path(study.lm).name}: held-out perplexity while masks are learned"
        draw_study(cells, results, references, title, args.figure)
    return int(len(results) < len(cells))


def _cost(args: argparse.Namespace, study: Study, cells: list[Cell], notes: list[str]) -> int:
    if args.cost_steps <= COST_SKIP:
        raise SystemExit(f"error: --cost_steps {args.cost_steps}: the first {COST_SKIP} don't count")
    tokens, seed = args.cost_steps * study.seq_len * study.batch_size, cells[0].seed
    kinds = dict.fromkeys((cell.pattern, cell.method) for cell in cells)
    jobs = {
        f"cost/{in_folders(pattern)}/{method.name}-{i}": Cell(method, pattern, tokens, seed)
        for i in range(args.repeat)
        for pattern, method in kinds
    }
    for name, cell in jobs.items():
        check_claim(study.out / name, cost_recipe(study, cell, study.out / name))
    results = _run_all(study, {n: partial(run_cost, study, cell, study.out / n) for n, cell in jobs.items()})
    rows = cost_rows(list(results.values()))
    notes = [*notes, *(f"{name} failed." for name in jobs if name not in results)]
    _write(args, cost_markdown(rows, notes), {"settings": _options(args), "rows": rows, "notes": notes})
    return int(len(results) < len(jobs))


def _run_all(study: Study, jobs: Mapping[str, Callable[[], dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Results by folder; one that fails is reported and left out."""
    found = {name: result for name in jobs if (result := result_of(study.out / name)) is not None}
    missing = [name for name in jobs if name not in found]
    for i, name in enumerate(missing):
        _say(f"{name}: begun")
        started = monotonic()
        try:
            found[name] = jobs[name]()
            ended = "finished"
            if study.store:
                put(study.store, name, study.out)
        except WorkFailed as failure:
            ended = f"FAILED, {failure}\n{name}: failed"
        _say(f"{name}: {ended} after {monotonic() - started:,.0f} s, {len(missing) - i - 1} left")
    return {name: found[name] for name in jobs if name in found}


def _say(line: str) -> None:
    print(line, flush=True)


def _options(args: argparse.Namespace) -> dict[str, Any]:
    """The command line without paths."""
    paths = ("out", "roi_data", "text", "store", "json", "markdown", "figure", "keep_checkpoints")
    return {name: value for name, value in vars(args).items() if name not in paths}


def _short(result: Mapping[str, Any]) -> dict[str, Any]:
    """A cell's result without paths of this machine."""
    return {key: value for key, value in result.items() if key != "arguments"}


def _write(args: argparse.Namespace, table: str, found: Mapping[str, Any]) -> None:
    print(table)
    if args.json:
        write_json(args.json, found)
    if args.markdown:
        with written_aside(args.markdown) as partial_file:
            partial_file.write_text(table)


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM):  # so that a child is ended too
        signal.signal(number, lambda n, _: sys.exit(128 + n))
    raise SystemExit(main())
