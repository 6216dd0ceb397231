"""RoI on a small budget: SmolLM2-135M at 2:4, 150 steps of 1,024 tokens of textbook text, then perplexities.

    python benchmarks/small_budget.py --roi_data FOLDER --out runs/small_budget

FOLDER holds `corpus/openstax_{train,validation}.jsonl.gz` and `wikitext-2-raw/wiki.test.raw`. The exported
directory is read back by transformers alone; token perplexity is over the first windows of 1,024 tokens.
"""

import argparse
import gzip
import json
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from roi_lightning.__main__ import main as roi_lightning
from roi_lightning.evaluation.perplexity import token_perplexity
from roi_lightning.models.loading import load_language_model
from roi_lightning.models.source import resolve_model
from roi_lightning.utils.atomic_io import write_json

WINDOW = 1024


def main() -> None:
    """Fit, export, measure, write the metrics as JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--roi_data", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("runs/small_budget"))
    parser.add_argument("--windows", type=int, default=12)
    parser.add_argument("--json", type=Path)
    args, overrides = parser.parse_known_args()
    started = time.monotonic()
    status = fit(args.roi_data, args.out, overrides)
    if status:
        raise SystemExit(status)
    seconds = round(time.monotonic() - started)
    results = {"seconds": seconds, **measure(args.out / "export", args.roi_data, args.windows)}
    print(json.dumps(results, indent=2))
    if args.json:
        write_json(args.json, results)


def fit(data: Path, out: Path, overrides: list[str]) -> int:
    """The quickstart on other text, for 150 steps, with a learning rate for that many and the paper's annealing."""
    options = {
        "data.corpora": str(data / "corpus/openstax_train.jsonl.gz"),
        "data.val_corpora": str(data / "corpus/openstax_validation.jsonl.gz"),
        "model.optimizer.init_args.lr": "1e-3",
        "model.lr_end": "1e-4",
        "model.prior": "activation",
        "model.prior_windows": "48",
        "trainer.max_steps": "150",
        "trainer.default_root_dir": str(out),
    }
    start = ["fit", "--config", "quickstart.yaml", "--config", "overlays/exponential_anneal.yaml"]
    return roi_lightning([*start, *(x for k, v in options.items() for x in (f"--{k}", v)), *overrides])


def measure(export: Path, data: Path, count: int) -> dict[str, dict[str, float]]:
    """Token perplexity of the base and of the export on both texts."""
    tokenizer = AutoTokenizer.from_pretrained(export)
    wikitext = (data / "wikitext-2-raw/wiki.test.raw").read_text(encoding="utf-8")
    with gzip.open(data / "corpus/openstax_validation.jsonl.gz", "rt", encoding="utf-8") as file:
        documents = [json.loads(line)["text"] for line in file]
    texts = {"wikitext2": wikitext, "openstax_validation": "\n\n".join(documents)}
    models = {
        "dense": load_language_model(resolve_model("smollm2-135m"), "bfloat16"),
        "roi": AutoModelForCausalLM.from_pretrained(export, dtype=torch.bfloat16),
    }
    results: dict[str, dict[str, float]] = {}
    for text_name, text in texts.items():
        ids = torch.tensor(tokenizer(text[: count * WINDOW * 8], add_special_tokens=False)["input_ids"])
        windows = ids[: count * WINDOW].view(count, WINDOW).split(1)
        results[text_name] = {name: round(token_perplexity(lm, windows), 2) for name, lm in models.items()}
    return results


if __name__ == "__main__":
    main()
