"""Every method's 2:4 mask for SmolLM2-135M, from the same textbook text, in one table.

    python benchmarks/methods.py --roi_data FOLDER --out runs/methods --json methods_2of4.json

FOLDER holds `corpus/openstax_{train,validation}.jsonl.gz`, `wikitext-2-raw/wiki.test.raw` and
`zeroshot/<task>.jsonl`. What an earlier call left in --out is kept, so that a run can be interrupted; the
times are those of pruning or fitting, measured when the mask was made.
"""

import argparse
import json
from pathlib import Path

from roi_lightning.__main__ import main as roi_lightning
from roi_lightning.utils.atomic_io import write_json
from roi_lightning.utils.tables import markdown_table

BASE = "smollm2-135m"
TASKS = ["arc_challenge", "arc_easy", "boolq", "piqa"]
PRUNED = {
    "magnitude": ["--method", "magnitude"],
    "wanda_dense": ["--method", "wanda", "--activations", "dense"],
    "wanda": ["--method", "wanda"],
    "sparsegpt_mask": ["--method", "sparsegpt", "--mask_only"],
    "sparsegpt_dense": ["--method", "sparsegpt", "--activations", "dense"],
    "sparsegpt": ["--method", "sparsegpt"],
}


def main() -> None:
    """Prune, learn, measure, merge."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--roi_data", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("runs/methods"))
    parser.add_argument("--windows", type=int, default=64)
    parser.add_argument("--pattern", default="2:4")
    parser.add_argument("--limit", type=int, default=250, help="questions per task")
    parser.add_argument("--only_make", action="store_true", help="make the masks, measure nothing")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    keep_settings(args)
    train = str(args.roi_data / "corpus/openstax_train.jsonl.gz")
    for name, options in PRUNED.items():
        text = ["--corpora", train, "--windows", str(args.windows), "--seq_len", "1024"]
        text = [] if name == "magnitude" else text
        out = ["--pattern", args.pattern, "--out", str(args.out / name)]
        made(args.out / name, ["prune", BASE, *options, *text, *out])
    made(args.out / "roi/export", fit(args, train))
    if args.only_make:
        return
    parts = {name: measured(args, name, options) for name, options in measurements(args).items()}
    results = merge(args, parts)
    print(as_markdown(results))
    if args.json:
        write_json(args.json, results)


def keep_settings(args: argparse.Namespace) -> None:
    """Refuse to mix results of different settings in one folder."""
    settings = {"windows": args.windows, "pattern": args.pattern, "limit": args.limit}
    file = args.out / "settings.json"
    if file.exists() and json.loads(file.read_text()) != settings:
        raise SystemExit(f"{args.out} holds results of {file.read_text().strip()}; choose another --out")
    args.out.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(settings) + "\n")


def made(out: Path, command: list[str]) -> None:
    """Run a command unless what it makes is there."""
    if not out.exists():
        print("roi-lightning", *command, flush=True)
        if roi_lightning(command):
            raise SystemExit(1)


def fit(args: argparse.Namespace, train: str) -> list[str]:
    """The quickstart on this text, for 150 steps, with a learning rate for that many and the paper's annealing."""
    run = str(args.out / "roi")
    options = {
        "model.pattern": args.pattern,
        "model.prior": "activation",
        "model.optimizer.init_args.lr": "1e-3",
        "model.lr_end": "1e-4",
        "model.prior_windows": str(2 * args.windows),  # of 512 tokens
        "data.corpora": train,
        "data.val_corpora": str(args.roi_data / "corpus/openstax_validation.jsonl.gz"),
        "trainer.max_steps": "150",
        "trainer.default_root_dir": run,
    }
    start = ["fit", "--config", "quickstart.yaml", "--config", "overlays/exponential_anneal.yaml"]
    return [*start, *(x for k, v in options.items() for x in (f"--{k}", v))]


def measurements(args: argparse.Namespace) -> dict[str, list[str]]:
    """The calls of `evaluate`: whole texts, a quarter of the articles, the first questions of every task."""
    perplexity = ["--tasks", "token_perplexity", "--seq_len", "1024"]
    zero_shot = ["--tasks", ",".join(TASKS), "--task_data", str(args.roi_data / "zeroshot")]
    words = ["--tasks", "word_perplexity", "--task_data", str(args.roi_data / "zeroshot")]
    validation = str(args.roi_data / "corpus/openstax_validation.jsonl.gz")
    return {
        "wikitext2": [*perplexity, "--text", str(args.roi_data / "wikitext-2-raw/wiki.test.raw")],
        "openstax": [*perplexity, "--text", validation],
        "words": [*words, "--limit", "0.25", "--batch_size", "1"],
        "zero_shot": [*zero_shot, "--limit", str(args.limit)],
    }


def measured(args: argparse.Namespace, name: str, options: list[str]) -> dict[str, dict[str, object]]:
    """Evaluate all models, each in a call of its own, so that none is measured twice."""
    models = {"dense": BASE} | {n: str(args.out / n) for n in PRUNED} | {"roi": str(args.out / "roi/export")}
    results = {}
    for label, model in models.items():
        out = args.out / "evaluations" / f"{label}.{name}.json"
        made(out, ["evaluate", model, *options, "--json", str(out)])
        results[label] = json.loads(out.read_text())["models"][model]
    return results


def merge(
    args: argparse.Namespace, parts: dict[str, dict[str, dict[str, object]]]
) -> dict[str, dict[str, object]]:
    """One row per model: seconds, three perplexities, four tasks."""
    rows: dict[str, dict[str, object]] = {}
    for label in parts["wikitext2"]:
        rows[label] = {
            "seconds": seconds(args.out, label),
            "wikitext2": parts["wikitext2"][label]["token_perplexity"],
            "wikitext2_words": parts["words"][label]["word_perplexity"],
            "openstax_validation": parts["openstax"][label]["token_perplexity"],
            **{task: parts["zero_shot"][label][task] for task in TASKS},
        }
    return rows


def seconds(out: Path, label: str) -> float | None:
    """What making the mask took."""
    if label == "dense":
        return None
    if label == "roi":
        summary = out / "roi/summary.json"  # not there if the fit was cut off after its export
        return float(json.loads(summary.read_text())["seconds"]) if summary.exists() else None
    return float(json.loads((out / label / "roi_sparsity.json").read_text())["training"]["seconds"])


def as_markdown(rows: dict[str, dict[str, object]]) -> str:
    """The table."""
    lines = []
    for label, row in rows.items():
        took = "" if row["seconds"] is None else f"{row['seconds']:,.0f}"
        perplexities = ["wikitext2", "openstax_validation", "wikitext2_words"]
        numbers = [f"{row[text]:,.2f}" for text in perplexities]
        accuracies = [f"{100 * row[task]['acc']:.1f} ± {100 * row[task]['acc_stderr']:.1f}" for task in TASKS]  # type: ignore[index]
        lines.append([label, took, *numbers, *accuracies])
    return markdown_table(["mask", "seconds", "WikiText-2", "OpenStax", "WikiText-2 per word", *TASKS], lines)


if __name__ == "__main__":
    main()
