"""What streamed text costs: ten million documents made on the fly, read, left, and entered again in the middle.

    python benchmarks/stream.py
    python benchmarks/stream.py --workers 2 --ranks 8 --json F.json

Documents are runs of words from Python's own language reference, in shards of ten thousand. A first data module is
set up, held-out text included, and reads `--read` documents' worth of batches. Its position in the text is moved to
the middle, stored and loaded as checkpoints are, and a second data module resumes there. The tokenizer is loaded
before the clock starts. With `--ranks` (1, 2, 4 or 8), what the first of so many ranks does: its part of the batches,
and of the reading.
"""

import argparse
import io
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from time import perf_counter
from typing import Any, Final

import psutil
import torch

from roi_lightning.data import CalibrationDataModule, Corpus
from roi_lightning.utils.atomic_io import write_json
from roi_lightning.utils.tables import print_table

_SHARD: Final = 10_000  # documents
_WORDS: Final = 300  # a document


@cache
def vocabulary() -> list[str]:
    """All words of the language reference, in its order."""
    from pydoc_data.topics import topics

    return " ".join(topics[name] for name in sorted(topics)).split()


def generate(shards: Sequence[int]) -> Iterator[dict[str, str]]:
    """The documents of some shards."""
    words = vocabulary()
    for shard in shards:
        draw = random.Random(shard)
        for _ in range(_SHARD):
            first = draw.randrange(len(words) - _WORDS)
            yield {"text": " ".join(words[first : first + _WORDS])}


class GeneratedText(CalibrationDataModule):
    """Streams documents that no disk holds.

    Args:
        documents: How many.
        options: Of the data module.
    """

    def __init__(self, documents: int, **options: Any) -> None:
        super().__init__(corpora=[Corpus("generated", streaming=True)], **options)
        self.documents = documents

    def stream(self, corpus: Corpus) -> Any:
        """The documents, in numbered shards."""
        import datasets

        features = datasets.Features({"text": datasets.Value("large_string")})
        shards = list(range(self.documents // _SHARD))
        return datasets.IterableDataset.from_generator(generate, features, {"shards": shards})


@dataclass
class Progress:
    """What a data module asks of a trainer."""

    world_size: int
    global_rank: int = 0
    global_step: int = 0
    max_steps: int = 1 << 40
    accumulate_grad_batches: int = 1


def batches(data: GeneratedText, trainer: Progress) -> Iterator[dict[str, Any]]:
    """Training batches, each a step of its own."""
    for batch in data.train_dataloader():
        used = data.on_before_batch_transfer(batch, 0)
        trainer.global_step += 1
        yield used


def resident() -> int:
    """Bytes that this process and the loader's workers hold in memory."""
    me = psutil.Process()
    return sum(process.memory_info().rss for process in (me, *me.children()))


def read(data: GeneratedText, trainer: Progress, documents: int, state: Any = None) -> dict[str, float]:
    """Set a data module up and read some documents' worth of its batches.

    Args:
        data: Not set up yet, its tokenizer loaded.
        trainer: How far it is.
        documents: Whose tokens to read.
        state: A position to resume from.

    Returns:
        Seconds, bytes and rates by name.
    """
    data.trainer = trainer  # type: ignore[assignment]
    begin = perf_counter()
    data.setup("fit")
    ready = perf_counter()
    if state is not None:
        data.load_state_dict(state)
        trainer.global_step = state["batches"] // trainer.world_size
    stream = batches(data, trainer)
    tokens = next(stream)["input_ids"].numel()
    first, held = perf_counter(), resident()
    per_document = tokens_per_document(data)
    start, count = perf_counter(), 0
    while count * tokens < documents * per_document:
        next(stream)
        count += 1
    seconds = perf_counter() - start
    return {
        "setup_s": ready - begin,
        "first_batch_s": first - ready,
        "first_batch_bytes": held,
        "last_batch_bytes": resident(),
        "tokens": count * tokens,
        "tokens_per_s": count * tokens / seconds,
    }


def tokens_per_document(data: GeneratedText) -> float:
    """Mean over the first hundred."""
    texts = [row["text"] for row, _ in zip(generate([0]), range(100), strict=False)]
    return sum(map(len, data.text_tokenizer(texts)["input_ids"])) / len(texts)


def in_the_middle(state: dict[str, Any], substreams: int, documents: int) -> Any:
    """A data module's position, through a file as checkpoints are, and moved to the middle of every substream."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    moved = torch.load(file, weights_only=True)
    for position in moved["positions"].values():
        position["corpora"][0]["shard"] = documents // _SHARD // substreams // 2
    return moved


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokenizer", default="smollm2-135m")
    parser.add_argument("--documents", type=int, default=10_000_000)
    parser.add_argument("--read", type=int, default=10_000, help="documents' worth of batches")
    parser.add_argument("--seq_len", type=int, default=4096)
    parser.add_argument("--batch_size", type=int, default=4)
    parser.add_argument("--held_out_fraction", type=float, default=0.005)
    parser.add_argument("--val_windows", type=int, default=32)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=1, choices=[1, 2, 4, 8])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    names = ("tokenizer", "seq_len", "batch_size", "held_out_fraction", "val_windows")
    settings = {name: getattr(options, name) for name in names} | {"num_workers": options.workers}
    start = GeneratedText(options.documents, **settings)
    tokenizer = start.text_tokenizer
    fresh = read(start, Progress(options.ranks), options.read)
    state = in_the_middle(start.state_dict(), len(start._substreams), options.documents)
    middle = GeneratedText(options.documents, **settings)
    middle.text_tokenizer = tokenizer
    resumed = read(middle, Progress(options.ranks), options.read // 10, state)
    print_results(options, fresh, resumed)
    if options.json:
        write_json(
            options.json, {"options": {**vars(options), "json": None}, "fresh": fresh, "resumed": resumed}
        )


def print_results(options: argparse.Namespace, fresh: dict[str, float], resumed: dict[str, float]) -> None:
    """Both side by side."""
    metrics = {
        "set up, with held-out text": ("setup_s", "{:.1f} s", 1),
        "then to the first batch": ("first_batch_s", "{:.2f} s", 1),
        "memory at the first batch": ("first_batch_bytes", "{:,.0f} MiB", 2**20),
        "memory at the last batch": ("last_batch_bytes", "{:,.0f} MiB", 2**20),
        "tokens read": ("tokens", "{:,.0f}", 1),
        "tokens per second": ("tokens_per_s", "{:,.0f}", 1),
    }
    rows = (
        [name, *(form.format(found[key] / unit) for found in (fresh, resumed))]
        for name, (key, form, unit) in metrics.items()
    )
    title = f"{options.documents:,} documents, {options.workers} workers, rank 0 of {options.ranks}"
    print_table(["", "from the start", "resumed in the middle"], rows, title)


if __name__ == "__main__":
    main()
