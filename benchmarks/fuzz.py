"""Mutated mask files and configurations against the readers: each must be accepted rightly or refused cleanly.

    python benchmarks/fuzz.py --minutes 5 --seed 0
    python benchmarks/fuzz.py --repeat masks:17

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
from pathlib import Path

import torch
from fuzz_configs import ConfigCases
from fuzz_masks import MaskCases
from fuzz_watch import Case, Outcome, limit_memory, watch
from rich.console import Console
from rich.table import Table
from rich.text import Text

_SHOWN = 40
_MASKS = 0.2


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
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


def table_of(results: dict[str, list[tuple[int, Outcome]]]) -> Table:
    table = Table("input", "cases", "accepted", "refused", "findings")
    for name, outcomes in results.items():
        for kind in sorted({outcome.kind for _, outcome in outcomes}):
            mine = [outcome for _, outcome in outcomes if outcome.kind == kind]
            counts = Counter("finding" if outcome.finding else outcome.result for outcome in mine)
            numbers = len(mine), counts["accepted"], counts["refused"], counts["finding"]
            table.add_row(f"{name}: {kind}", *map(str, numbers))
        every = Counter("finding" if outcome.finding else outcome.result for _, outcome in outcomes)
        numbers = len(outcomes), every["accepted"], every["refused"], every["finding"]
        table.add_row(Text(name, "bold"), *map(str, numbers), end_section=True)
    return table


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
    Console().print(table_of(results))
    found = [(n, seed, x) for n, outcomes in results.items() for seed, x in outcomes if x.finding]
    for name, seed, outcome in found[:_SHOWN]:
        Console().print(Text(f"--repeat {name}:{seed}  {outcome.kind}: {outcome.finding}"), soft_wrap=True)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
