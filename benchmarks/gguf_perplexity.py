"""Token perplexity of a GGUF file in llama.cpp, and of the directory it was converted from in transformers.

    python -m benchmarks.gguf_perplexity EXPORT FILE.gguf … --text wiki.test.raw --limit 8

The same tokens in the same windows. Needs llama-cpp-python.
"""

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

import llama_cpp
import torch
from torch import Tensor
from torch.nn import functional as F

from roi_lightning.data.corpora import Corpus
from roi_lightning.evaluation.perplexity import Cut, EvalText, read_text, token_perplexity
from roi_lightning.models.config import load_tokenizer
from roi_lightning.models.loading import load_language_model
from roi_lightning.models.source import resolve_model
from roi_lightning.utils.progress import progress
from roi_lightning.utils.tables import print_table


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print a table."""
    args = build_parser().parse_args(argv)
    text = read_text(Corpus(str(args.text)))
    assert isinstance(text, EvalText)
    cut = Cut(args.seq_len, False, args.limit)
    batches = cut.batches(cut.encode(load_tokenizer(args.directory), text.whole), 1)
    lm = load_language_model(resolve_model(args.directory), "float32", device=torch.device("cpu"))
    with torch.no_grad():
        ours = token_perplexity(lm, batches)
    rows = [[args.directory, f"{ours:.4f}", "1.0000"]]
    for file in args.files:
        found = perplexity(file, [window for batch in batches for window in batch])
        rows.append([file.name, f"{found:.4f}", f"{found / ours:.4f}"])
    print_table(["", "perplexity", "÷ directory"], rows)


def build_parser() -> argparse.ArgumentParser:
    """The options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", help="the export")
    parser.add_argument("files", nargs="+", type=Path, help="GGUF files of it")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--seq_len", type=int, default=512)
    parser.add_argument("--limit", type=int, default=8, help="windows")
    return parser


def perplexity(file: Path, windows: list[Tensor]) -> float:
    """Of a GGUF file, as `token_perplexity` defines it."""
    length = len(windows[0])
    llm = llama_cpp.Llama(str(file), n_ctx=length, n_batch=length, logits_all=True, verbose=False)
    total = 0.0
    for window in progress(windows, file.name):
        llm.reset()
        llm.eval(window.tolist())
        logits = torch.from_numpy(llm.scores[: length - 1])
        total += float(F.cross_entropy(logits.double(), window[1:], reduction="sum"))
    return math.exp(total / (len(windows) * (length - 1)))


if __name__ == "__main__":
    main()
