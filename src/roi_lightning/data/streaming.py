"""Streamed text as endless windows that can be entered anywhere: what a run needs to resume in the middle.

A corpus is read shard after shard. The shards of large corpora are assigned to a few substreams, independent of
each other; the batches of a run come from the substreams in turn, so that a rank or a loader's worker tokenises
only the substreams that it needs. Their number follows from the corpora alone: the order of the batches is the
same on any number of ranks and workers.

A position is what a checkpoint stores of a substream: a few integers and fewer than `seq_len` tokens a corpus.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, islice
from typing import TYPE_CHECKING, Any, Final, Self

import fsspec.asyn
import numpy as np
import torch
import torch.distributed
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch.utils.data import IterableDataset as TorchIterableDataset
from torch.utils.data import get_worker_info
from typing_extensions import override

from roi_lightning.data.files import readable
from roi_lightning.data.packing import (
    DOCUMENTS_AT_ONCE,
    Packer,
    TextTokenizer,
    as_batch,
    counted_windows,
)
from roi_lightning.data.resumable_order import ResumableLoader
from roi_lightning.errors import UserError
from roi_lightning.models.config import check_embedded

if TYPE_CHECKING:
    from datasets import IterableDataset

Position = dict[str, Any]
PROGRESS: Final = "progress"
_MAX_SUBSTREAMS: Final = 8
_MIN_SHARDS: Final = 8  # of a substream: they differ in length by one shard, an eighth
_START: Final[Position] = {"shard": 0, "row": 0, "carry": None, "taken": 0}


@dataclass(frozen=True)
class WindowReader:
    """The windows of a corpus or of some of its shards, int64 `[seq_len]`, each with the position after it.

    Tokens whose prediction does not count are marked as in `packing`, and windows without any other are left out.

    A position names the shard and row at which a chunk of documents begins, the text carried into the chunk,
    and how many of its windows are taken: resuming there tokenises at most one chunk again, and reads again
    what comes before the row in its shard.

    Attributes:
        documents: With the column `text`.
        keeps: Whether a document is to be read.
        convert: What makes tokens of them.
        seq_len: Window length in tokens, BOS included.
        shards: Which shards of the documents to read.
    """

    documents: "IterableDataset"
    keeps: Callable[[str], bool]
    convert: TextTokenizer
    seq_len: int
    shards: range

    def part(self, number: int, parts: int) -> Self:
        """A reader of one of several parts of the shards, as equal as undivided shards allow."""
        count = len(self.shards)
        return replace(self, shards=self.shards[count * number // parts : count * (number + 1) // parts])

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
                    f"corpus {self.convert.source!r} has less text than one window of {self.seq_len} tokens (that "
                    "holds an answer, with loss_on: answers); give more text or lower data.seq_len"
                )
            position = None

    def once(self, position: Position | None = None) -> Iterator[tuple[Tensor, Position]]:
        """Windows from a position to the end of the last shard, the incomplete last one dropped."""
        at = position or _START
        carry, taken = at["carry"], at["taken"]
        carried = None if carry is None else np.asarray(carry)
        packer = Packer(self.seq_len, self.convert.separator, self.convert.bos, carried)
        for shard, row, texts in self._chunks(at["shard"], at["row"]):
            carry = None if packer.carry is None else torch.from_numpy(packer.carry)
            kept = [text for text in texts if text is not None and self.keeps(text)]
            windows = counted_windows(packer(self.convert(kept) if kept else []))
            check_embedded(windows, self.convert.tokenizer, self.convert.model)
            for number, window in enumerate(windows[taken:].astype(np.int64), taken + 1):
                position = {"shard": shard, "row": row, "carry": carry, "taken": number}
                yield torch.from_numpy(window), position
            taken = 0

    def _chunks(self, shard: int, row: int) -> Iterator[tuple[int, int, list[str | None]]]:
        for number in range(shard, len(self.shards)):
            rows = self.documents.shard(self.documents.num_shards, self.shards[number])
            # Not iter(rows), which in a loader's worker would divide the shards a second time.
            chunks = (rows.skip(row) if row else rows).iter(DOCUMENTS_AT_ONCE)
            with readable(self.convert.source):
                for chunk in chunks:
                    yield number, row, chunk["text"]
                    row += len(chunk["text"])
            row = 0


@dataclass(frozen=True)
class Substream:
    """Windows mixed from corpora by weight.

    Which corpus a window comes from is a pure function of seed, substream and window.

    Attributes:
        readers: One a corpus.
        weights: Positive, one a corpus.
        seed: Of the choices: that of the run and the substream's number.
    """

    readers: Sequence[WindowReader]
    weights: Sequence[float]
    seed: tuple[int, int]

    def windows(self, position: Position | None = None) -> Iterator[tuple[Tensor, Position]]:
        """Windows from a position on, without end, each with the position after it."""
        first = position["windows"] if position else 0
        corpora = list(position["corpora"]) if position else [None] * len(self.readers)
        streams = [reader.windows(at) for reader, at in zip(self.readers, corpora, strict=True)]
        probabilities = np.asarray(self.weights) / np.sum(self.weights)
        for number in count(first):
            chosen = int(np.random.default_rng([*self.seed, number]).choice(len(streams), p=probabilities))
            window, corpora[chosen] = next(streams[chosen])
            yield window, {"windows": number + 1, "corpora": list(corpora)}


@dataclass(eq=False)
class StreamedBatches(TorchIterableDataset[dict[str, Any]]):
    """Endless batches from substreams in turn: those of `as_batch`, each with its "progress".

    Batches are counted over all ranks: in micro-batch k, rank r of w takes batch k * w + r, which comes from
    substream (k * w + r) % substreams. `progress` is the substream's number, its position after the batch, and how
    many batches the run has had when every rank has had as many as this one.

    Attributes:
        substreams: The substreams.
        batch_size: Windows per batch.
        rank: This process.
        world_size: Number of processes.
        start: First batch of the whole run to yield.
        positions: Of the substreams before that batch; one that is missing is at its beginning.
    """

    substreams: Sequence[Substream]
    batch_size: int
    rank: int = 0
    world_size: int = 1
    start: int = 0
    positions: dict[int, Position] = field(default_factory=dict)

    @override
    def __iter__(self) -> Iterator[dict[str, Any]]:
        worker = get_worker_info()
        index, workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        first = self.start + index * self.world_size + self.rank
        streams = [self._batches(index) for index in range(len(self.substreams))]
        for wanted in count(first, workers * self.world_size):
            yield next(batch for number, batch in streams[wanted % len(streams)] if number == wanted)

    def _batches(self, index: int) -> Iterator[tuple[int, dict[str, Any]]]:
        """The batches of a substream from `start` on, all ranks' and workers', by number."""
        windows = self.substreams[index].windows(self.positions.get(index))
        first = self.start + (index - self.start) % len(self.substreams)
        for number in count(first, len(self.substreams)):
            rows, positions = zip(*islice(windows, self.batch_size), strict=True)
            after = number - self.rank + self.world_size
            progress = {"substream": index, "position": positions[-1], "batches": after}
            yield number, as_batch(torch.stack(rows)) | {PROGRESS: progress}


class StreamLoader(ResumableLoader):
    """A loader of streamed batches.

    Args:
        batches: What to load.
        begin: Called at each `__iter__`; returns the first batch and the substreams' positions before it.
        num_workers: Loader processes.
    """

    def __init__(
        self, batches: StreamedBatches, begin: Callable[[], tuple[int, dict[int, Position]]], num_workers: int
    ) -> None:
        super().__init__(batches, batch_size=None, num_workers=num_workers, worker_init_fn=_start_worker)
        self.batches, self.begin = batches, begin

    @override
    def __iter__(self) -> Any:
        self.batches.start, self.batches.positions = self.begin()
        return super().__iter__()


def _start_worker(worker: int) -> None:
    # A forked process has neither the tokenizer's threads nor those of remote file systems.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    fsspec.asyn.reset_lock()


def make_substreams(readers: Sequence[WindowReader], weights: Sequence[float], seed: int) -> list[Substream]:
    """Assign the shards of corpora to as many substreams as every corpus has shards for.

    Args:
        readers: One a corpus.
        weights: Positive, one a corpus.
        seed: Of the choices between corpora.
    """
    shards = min(len(reader.shards) for reader in readers)
    parts = max(1, min(_MAX_SUBSTREAMS, shards // _MIN_SHARDS))
    return [
        Substream([reader.part(i, parts) for reader in readers], weights, (seed, i)) for i in range(parts)
    ]


class StreamState:
    """The substreams' positions after the batches that went into optimizer steps.

    Loaders read ahead of training, so each batch carries the position after itself, which counts once the batch is
    used; the micro-batches of a step count together, once the step is made.

    Args:
        text: What identifies this text and its windows, plain values by the option they come from.
        micro_batch: Returns how many micro-batches each rank has put into steps.
    """

    def __init__(self, text: Mapping[str, Any], micro_batch: Callable[[], int]) -> None:
        self.text, self.micro_batch = dict(text), micro_batch
        self._batches = 0
        self._positions: dict[int, Position] = {}
        self._pending: list[dict[str, Any]] = []
        self._settled = 0
        self._restart_reason = "the checkpoint holds no position in it"

    def begin(self) -> tuple[int, dict[int, Position]]:
        """Continue after the batches used so far: in a fresh run, a resumed one, or the next epoch.

        Returns:
            The first batch to read, counted over all ranks, and the substreams' positions before it.
        """
        self._settle()
        self._settled, self._pending = self.micro_batch(), []
        if self._settled and not self._batches:
            rank_zero_info(f"the streamed text is read from its beginning: {self._restart_reason}")
        return self._batches, dict(self._positions)

    def use(self, progress: dict[str, Any]) -> None:
        """Note that this rank trains on a batch with this `progress` (see `StreamedBatches`)."""
        self._settle()
        self._pending.append(progress)

    def _settle(self) -> None:
        done = self._pending[: max(0, self.micro_batch() - self._settled)]
        self._pending = self._pending[len(done) :]
        self._settled += len(done)
        for progress in done:
            self._batches = progress["batches"]
            self._positions[progress["substream"]] = progress["position"]

    def state_dict(self) -> dict[str, Any]:
        """Text, batches used and all positions; every rank has to call it, as each knows its own batches only."""
        self._settle()
        return {"text": self.text, "batches": self._batches, "positions": _furthest(self._positions)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from what `state_dict` returned, on any number of ranks; from the beginning in other text."""
        names = self.text.keys() | state["text"].keys()
        other = sorted(name for name in names if self.text.get(name) != state["text"].get(name))
        if other:
            self._restart_reason = f"{' and '.join(other)} differ from those of the checkpoint"
        else:
            self._batches, self._positions = state["batches"], dict(state["positions"])


def _furthest(positions: dict[int, Position]) -> dict[int, Position]:
    """For every substream the position of the rank that has come furthest."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return dict(positions)
    parts: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(parts, positions)
    furthest: dict[int, Position] = {}
    for index, position in (item for part in parts for item in part.items()):
        if index not in furthest or position["windows"] > furthest[index]["windows"]:
            furthest[index] = position
    return furthest
