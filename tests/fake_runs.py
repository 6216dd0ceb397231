"""Folders of runs as `fit` leaves them, with invented figures, for pages of reports."""

import json
import math
import random
from pathlib import Path

from roi_lightning.reports.run_files import RECORD
from roi_lightning.reports.run_record import append

KINDS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
KINDS += ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
TEXT = " the file is opened for reading, and the position is set to its end. If the mode is not given, it"


def start(step=0, max_steps=45, resumed_from=None, **changes):
    """The fields of a leg's first line."""
    run = {"model": "smollm2-135m", "learner": "RoILightningModule", "method": "roi", "pattern": "2:4"}
    run |= {"learned_parameters": 106_168_320, "layers": 210, "masked_weights": 106_168_320}
    run |= {"corpora": ["python-docs"], "seq_len": 512, "windows_per_step": 2, "tokens_per_step": 1024}
    run |= {
        "settings": {"model.prior": "activation", "model.init_std": 0.003, "data.corpora": [{"source": "a"}]}
    }
    machine = {"device": "CPU", "cpu": "Some CPU @ 2.50GHz", "cores": 2, "memory_gib": 7.8, "os": "Linux 6.1"}
    fields = {
        "time": f"2026-11-24T10:0{step % 10}:00+00:00",
        "step": step,
        "resumed_from": resumed_from,
        "command": ["fit", "--config", "quickstart.yaml", "--trainer.max_steps", str(max_steps)],
        "max_steps": max_steps,
        "seed": 0,
        "commit": "0123456789abcdef0123456789abcdef01234567",
        "versions": {
            "roi_lightning": "0.1.0",
            "torch": "2.13.0",
            "transformers": "5.23.0",
            "python": "3.11.9",
        },
        "machine": machine,
        "run": run,
    }
    return {**fields, **changes}


def write_leg(
    folder,
    *,
    seed=0,
    max_steps=45,
    first=0,
    last=None,
    every=None,
    status="finished",
    message=None,
    **changes,
):
    """Append a leg to a run's record: the loss, and the rest every so many steps; no end where the status is None."""
    chance, record = random.Random(f"{seed} {first}"), folder / RECORD
    last = max_steps if last is None else last
    resumed_from = f"{folder}/checkpoints/step={first}.ckpt" if first else None
    append(record, "start", start(first, max_steps, resumed_from, **changes))
    for step in range(first + 1, last + 1):
        done = step / max_steps
        values = {"train/loss": 4.4 - 1.1 * (1 - math.exp(-4 * done)) - seed / 9 + chance.gauss(0, 0.09)}
        if every and (step % every == 0 or step == last):
            values |= {
                "val/perplexity": 33 + 30 * math.exp(-3 * done) - 2 * seed,
                "lr": 0.0015 * (1 - 0.9 * done),
            }
            values |= {"anneal/lambda": 0.005 - 0.003 * done, "anneal/tau": 0.2 - 0.15 * done}
            values |= {"mask/entropy": 0.6 - 0.4 * done, "mask/settled": 0.1 + 0.8 * done}
            values |= {"mask/flips": 0.02 * math.exp(-2 * done), "mask/flips_from_prior": 0.11 * done}
            values |= {"tokens/per_second": 310 + chance.gauss(0, 6), "tokens/seen": 1024.0 * step}
            values |= {"memory/peak_gib": 3.1}
        append(record, "metrics", {"step": step, "time": 1e9 + step, "values": values})
    if status:
        end = {"time": "2026-11-24T10:20:00+00:00", "status": status, "step": last, "message": message}
        append(record, "end", end | {"seconds": 4.2 * (last - first)})


def corner(chance):
    """Eight rows of two 2:4 groups."""
    groups = ("1100", "1010", "1001", "0110", "0101", "0011")
    return ["".join(chance.choices(groups, k=2)) for _ in range(8)]


def mask_story(seed=0, blocks=30):
    """What a run says of its mask."""
    chance = random.Random(seed)
    names = [f"model.layers.{i}.{kind}.weight" for i in range(blocks) for kind in KINDS]
    changed = {name: {"kept": 10_000, "both": 10_000 - chance.randrange(300, 1900)} for name in names}
    kinds = [kind.rpartition(".")[2] for kind in KINDS]
    overlap = {
        other: {"all": share, "kinds": {kind: share + chance.uniform(-0.05, 0.05) for kind in kinds}}
        for other, share in (("magnitude", 0.71), ("wanda", 0.88), ("activation", 0.9))
    }
    corners = []
    for kind in ("q_proj", "k_proj", "up_proj"):
        before = corner(chance)
        after = [
            row if chance.random() < 0.7 else other for row, other in zip(before, corner(chance), strict=True)
        ]
        corners.append({"layer": f"model.layers.15.{kind}.weight", "before": before, "after": after})
    story = {"pattern": "2:4", "reference": "activation", "changed": changed, "overlap": overlap}
    return story | {"corners": corners, "skipped": {}}


def write_run(folder: Path, *, seed=0, prompts=(), **leg):
    """A run that has ended well."""
    folder.mkdir(parents=True)
    write_leg(folder, seed=seed, **leg)
    write_results(folder, seed=seed, prompts=prompts, steps=leg.get("max_steps", 45))
    return folder


def write_results(folder, *, seed=0, prompts=(), steps=45):
    """What a run writes when it has ended well, but for its export."""
    perplexity = {"dense": 17.5, "magnitude": 431.2, "activation": 52.13, "roi": 36.8 - seed}
    summary = {"perplexity": perplexity, "pattern": "2:4", "zeros": {"prunable": 0.5, "model": 0.394}}
    summary |= {"held_out_tokens": 8192, "steps": steps, "seconds": 190.4, "export": None}
    (folder / "summary.json").write_text(json.dumps(summary))
    answers = {
        "dense": TEXT,
        "activation": " the the the file is is of of the the",
        "roi": TEXT.replace("end", "start"),
    }
    told = [
        {
            "prompt": "When a file is opened in append mode,",
            "source": "held-out text",
            "expected": TEXT,
            "answers": answers,
        },
        *({"prompt": p, "source": "given", "expected": None, "answers": answers} for p in prompts),
    ]
    generation = {"max_new_tokens": 48, "method": "greedy"}
    report = {"mask": mask_story(seed), "continuations": told, "generation": generation}
    (folder / "report.json").write_text(json.dumps(report))


def evaluation(dense="smollm2-135m"):
    """What `evaluate --json` writes, shortened."""
    tasks = {"hellaswag": {"acc": 0.35, "acc_stderr": 0.0047, "acc_norm": 0.43, "acc_norm_stderr": 0.005}}
    tasks |= {"piqa": {"acc": 0.68, "acc_stderr": 0.011}, "average": {"acc": 0.515}}
    worse = {"hellaswag": {"acc": 0.29, "acc_stderr": 0.0045, "acc_norm": 0.31, "acc_norm_stderr": 0.0046}}
    worse |= {"piqa": {"acc": 0.6, "acc_stderr": 0.0114}, "average": {"acc": 0.445}}
    models = {
        dense: {"token_perplexity": 17.5, "word_perplexity": 38.1, **tasks},
        "runs/quickstart/export": {"token_perplexity": 36.8, "word_perplexity": "inf", **worse},
    }
    settings = {"tasks": ["token_perplexity", "word_perplexity", "hellaswag", "piqa"], "limit": None}
    settings |= {
        "seq_len": 512,
        "batch_size": 8,
        "dtype": "auto",
        "device": "cpu",
        "text": None,
        "dense": dense,
    }
    return {"models": models, "settings": settings}
