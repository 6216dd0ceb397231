"""Mutated mask files and configurations against the readers: each must be accepted rightly or refused cleanly.

    python -m benchmarks.fuzz --minutes 5 --seed 0
    python -m benchmarks.fuzz --repeat masks:17

A finding is anything else: another exception, a file accepted that was changed, more than half a minute, more than
a few gigabytes. Each is printed with what repeats it; the exit status is 1 if there was one.
"""

import argparse
import logging
import os
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from rich.text import Text

from benchmarks.fuzz.configs import ConfigCases
from benchmarks.fuzz.masks import MaskCases
from benchmarks.fuzz.watch import Case, Outcome, limit_memory, watch
from roi_lightning.utils.tables import print_table

_SHOWN = 40
_MASKS = 0.2


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.fuzz",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--minutes", type=float, default=5.0, help="for both together")
    parser.add_argument("--seed", type=int, default=0, help="of the first case; each has its own")
    parser.add_argument("--repeat", metavar="TARGET:SEED", help="one case alone: masks:17, configs:3")
    return parser


def make_targets(folder: Path) -> dict[str, Case]:
    """What is fuzzed, by name; `folder` is filled and becomes the working directory."""
    os.chdir(folder)
    masks = MaskCases(folder)
    return {"masks": masks, "configs": ConfigCases(folder, masks.model)}


def fuzz(name: str, case: Case, seeds: range, until: float) -> list[tuple[int, Outcome]]:
    """Run cases until time is up or seeds are."""
    outcomes = []
    for seed in seeds:
        if time.monotonic() > until:
            break
        outcomes.append((seed, watch(case, seed)))
        if outcomes[-1][1].finding:
            sys.stderr.write(f"{name}:{seed} ({outcomes[-1][1].kind}): {outcomes[-1][1].finding}\n")
    return outcomes


def table_rows(results: dict[str, list[tuple[int, Outcome]]]) -> Iterator[list[str | Text] | None]:
    """A row per kind of case, one for each target in bold, and a rule below it."""
    for name, outcomes in results.items():
        for kind in sorted({outcome.kind for _, outcome in outcomes}):
            yield [f"{name}: {kind}", *counts(outcome for _, outcome in outcomes if outcome.kind == kind)]
        yield [Text(name, "bold"), *counts(outcome for _, outcome in outcomes)]
        yield None


def counts(outcomes: Iterable[Outcome]) -> list[str]:
    """How many there are, and how many were accepted, refused, and findings."""
    found = Counter("finding" if outcome.finding else outcome.result for outcome in outcomes)
    return [str(n) for n in (found.total(), found["accepted"], found["refused"], found["finding"])]


def main() -> int:
    args = build_parser().parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as folder:
        targets = make_targets(Path(folder))
        limit_memory()
        if args.repeat:
            name, _, seed = args.repeat.partition(":")
            results = {name: fuzz(name, targets[name], range(int(seed), int(seed) + 1), float("inf"))}
        else:
            # Parsing a configuration takes a hundred times as long as reading a mask.
            shares = {"masks": 60 * args.minutes * _MASKS, "configs": 60 * args.minutes * (1 - _MASKS)}
            seeds = range(args.seed, args.seed + 10**9)
            results = {n: fuzz(n, case, seeds, time.monotonic() + shares[n]) for n, case in targets.items()}
        os.chdir("/")
    print_table(["input", "cases", "accepted", "refused", "findings"], table_rows(results))
    found = [(n, seed, x) for n, outcomes in results.items() for seed, x in outcomes if x.finding]
    for name, seed, outcome in found[:_SHOWN]:
        print(f"--repeat {name}:{seed}  {outcome.kind}: {outcome.finding}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
