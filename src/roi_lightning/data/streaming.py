"""Streamed text as endless windows that can be entered anywhere: what a run needs to go on in the middle.

A corpus is read shard after shard. The shards of large corpora are dealt to a few lanes, sub-streams that know
nothing of each other; the batches of a run come from the lanes in turn, so that a rank or a loader's worker
tokenises only the lanes that it needs. How many lanes there are follows from the corpora alone: the order of
the batches is the same on any number of ranks and workers.

A position is what a checkpoint stores of a lane: a few numbers and fewer than `seq_len` tokens a corpus.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from itertools import count, islice
from typing import TYPE_CHECKING, Any, Final, Self

import fsspec.asyn
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset as TorchIterableDataset
from torch.utils.data import get_worker_info
from transformers import PreTrainedTokenizerBase
from typing_extensions import override

from roi_lightning.data.corpora import read_rows
from roi_lightning.data.order import ResumableLoader
from roi_lightning.data.packing import DOCUMENTS_AT_ONCE, Packer, find_bos, tokenize
from roi_lightning.errors import UserError

if TYPE_CHECKING:
    from datasets import IterableDataset

Position = dict[str, Any]
PLACE: Final = "place"
_LANES: Final = 8
_SHARDS_PER_LANE: Final = 8  # at least: lanes differ in length by one shard, an eighth
_START: Final[Position] = {"shard": 0, "row": 0, "carry": None, "taken": 0}


class WindowReader:
    """The windows of a corpus or of some of its shards, int64 `[seq_len]`, each with the position after it.

    A position names the shard and row at which a chunk of documents begins, the text carried into the chunk,
    and how many of its windows are taken: going on there tokenises at most one chunk again, and reads again
    what comes before the row in its shard.

    Args:
        documents: With the column `text`.
        source: What errors call the corpus.
        keeps: Whether a document is to be read.
        tokenizer: What makes tokens of it.
        seq_len: Window length in tokens, BOS included.

    Attributes:
        bos: Token id that every window begins with, None for text alone.
        shards: Which shards of the documents to read.
    """

    def __init__(
        self,
        documents: "IterableDataset",
        source: str,
        keeps: Callable[[str], bool],
        tokenizer: PreTrainedTokenizerBase,
        seq_len: int,
    ) -> None:
        self.documents, self.source, self.keeps = documents, source, keeps
        self.tokenizer, self.seq_len, self.bos = tokenizer, seq_len, find_bos(tokenizer)
        self.shards = range(documents.num_shards)

    def part(self, number: int, parts: int) -> Self:
        """A reader of one of several parts of the shards, as equal as whole shards allow."""
        reader, count = copy(self), len(self.shards)
        reader.shards = self.shards[count * number // parts : count * (number + 1) // parts]
        return reader

    def windows(self, position: Position | None = None) -> Iterator[tuple[Tensor, Position]]:
        """Windows without end: the shards from a position on, then all of them again and again.

        Raises:
            UserError: If they have less text than one window, or can't be read.
        """
        while True:
            empty = position is None
            for item in self.once(position):
                empty = False
                yield item
            if empty:
                raise UserError(
                    f"corpus {self.source!r} has less text than one window of {self.seq_len} tokens; "
                    "give more text or lower data.seq_len"
                )
            position = None

    def once(self, position: Position | None = None) -> Iterator[tuple[Tensor, Position]]:
        """Windows from a position to the end of the last shard, the incomplete last one dropped."""
        at = position or _START
        carry, taken = at["carry"], at["taken"]
        carried = None if carry is None else np.asarray(carry)
        packer = Packer(self.seq_len, self.tokenizer.eos_token_id, self.bos, carried)
        for shard, row, texts in self._chunks(at["shard"], at["row"]):
            carry = None if packer.carry is None else torch.from_numpy(packer.carry)
            kept = [text for text in texts if text is not None and self.keeps(text)]
            windows = packer(tokenize(kept, self.tokenizer) if kept else [])
            for number, window in enumerate(windows[taken:].astype(np.int64), taken + 1):
                position = {"shard": shard, "row": row, "carry": carry, "taken": number}
                yield torch.from_numpy(window), position
            taken = 0

    def _chunks(self, shard: int, row: int) -> Iterator[tuple[int, int, list[str | None]]]:
        for number in range(shard, len(self.shards)):
            rows = self.documents.shard(self.documents.num_shards, self.shards[number])
            # Not iter(rows), which in a loader's worker would deal the shards out a second time.
            chunks = (rows.skip(row) if row else rows).iter(DOCUMENTS_AT_ONCE)
            for chunk in read_rows(chunks, f"corpus {self.source!r}"):
                yield number, row, chunk["text"]
                row += len(chunk["text"])
            row = 0


class Lane:
    """Windows mixed from corpora by weight.

    Which corpus a window comes from is a pure function of seed, lane and window.

    Args:
        readers: One a corpus.
        weights: Positive, one a corpus.
        seed: Of the choices: that of the run and the lane's number.
    """

    def __init__(
        self, readers: Sequence[WindowReader], weights: Sequence[float], seed: tuple[int, int]
    ) -> None:
        self.readers, self.seed = readers, seed
        self.shares = np.asarray(weights) / np.sum(weights)

    def windows(self, position: Position | None = None) -> Iterator[tuple[Tensor, Position]]:
        """Windows from a position on, without end, each with the position after it."""
        first = position["windows"] if position else 0
        corpora = list(position["corpora"]) if position else [None] * len(self.readers)
        streams = [reader.windows(at) for reader, at in zip(self.readers, corpora, strict=True)]
        for number in count(first):
            chosen = int(np.random.default_rng([*self.seed, number]).choice(len(streams), p=self.shares))
            window, corpora[chosen] = next(streams[chosen])
            yield window, {"windows": number + 1, "corpora": list(corpora)}


class StreamedBatches(TorchIterableDataset[dict[str, Any]]):
    """Endless batches `{"input_ids": int64 [batch, seq_len], "place": …}` from lanes in turn.

    Batches are counted over all ranks: in micro-batch k, rank r of w takes batch k * w + r, which comes from lane
    (k * w + r) % lanes. A place is the lane's number, its position after the batch, and how many batches the run
    has had when every rank has had as many as this one.

    Args:
        lanes: The lanes.
        batch_size: Windows per batch.
        rank: This process.
        world_size: Number of processes.

    Attributes:
        start: First batch of the whole run to yield.
        positions: Of the lanes before that batch; a lane that is missing stands at its beginning.
    """

    def __init__(self, lanes: Sequence[Lane], batch_size: int, rank: int = 0, world_size: int = 1) -> None:
        self.lanes, self.batch_size, self.rank, self.world_size = lanes, batch_size, rank, world_size
        self.start = 0
        self.positions: dict[int, Position] = {}

    @override
    def __iter__(self) -> Iterator[dict[str, Any]]:
        worker = get_worker_info()
        index, workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        first = self.start + index * self.world_size + self.rank
        lanes = [self._batches(lane) for lane in range(len(self.lanes))]
        for wanted in count(first, workers * self.world_size):
            yield next(batch for number, batch in lanes[wanted % len(lanes)] if number == wanted)

    def _batches(self, lane: int) -> Iterator[tuple[int, dict[str, Any]]]:
        """The batches of a lane from `start` on, all ranks' and workers', by number."""
        windows = self.lanes[lane].windows(self.positions.get(lane))
        first = self.start + (lane - self.start) % len(self.lanes)
        for number in count(first, len(self.lanes)):
            rows, positions = zip(*islice(windows, self.batch_size), strict=True)
            after = number - self.rank + self.world_size
            place = {"lane": lane, "position": positions[-1], "batches": after}
            yield number, {"input_ids": torch.stack(rows), PLACE: place}


class StreamLoader(ResumableLoader):
    """A loader of streamed batches that asks where to begin whenever it is begun.

    Args:
        batches: What to load.
        where: Says the first batch and the lanes' positions before it.
        num_workers: Loader processes.
    """

    def __init__(
        self, batches: StreamedBatches, where: Callable[[], tuple[int, dict[int, Position]]], num_workers: int
    ) -> None:
        super().__init__(batches, batch_size=None, num_workers=num_workers, worker_init_fn=_start_worker)
        self.batches, self.where = batches, where

    @override
    def __iter__(self) -> Any:
        self.batches.start, self.batches.positions = self.where()
        return super().__iter__()


def _start_worker(worker: int) -> None:
    # A forked process has neither the tokenizer's threads nor those of remote file systems.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    fsspec.asyn.reset_lock()


def make_lanes(readers: Sequence[WindowReader], weights: Sequence[float], seed: int) -> list[Lane]:
    """Deal the shards of corpora to as many lanes as all of them fill.

    Args:
        readers: One a corpus.
        weights: Positive, one a corpus.
        seed: Of the choices between corpora.
    """
    fewest = min(len(reader.shards) for reader in readers)
    lanes = max(1, min(_LANES, fewest // _SHARDS_PER_LANE))
    return [
        Lane([reader.part(lane, lanes) for reader in readers], weights, (seed, lane)) for lane in range(lanes)
    ]
