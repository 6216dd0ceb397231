"""Which windows each rank trains on, as a pure function of the seed and the micro-batch number.

Nothing about the order is state: an interrupted run and its continuation see together exactly what an
uninterrupted run would have seen, on any number of ranks.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Sampler

if TYPE_CHECKING:
    from datasets import Dataset


class ResumableOrder(Sampler[int]):
    """Shuffled passes over `num_items`, cut to the length of a run and divided over ranks.

    Sample position p, counted over all ranks from the start of the run, is item p % num_items of pass
    p // num_items; every pass has its own permutation. In micro-batch k, rank r of w takes the positions
    from (k * w + r) * batch_size up to (k * w + r + 1) * batch_size.

    Args:
        num_items: Size of the dataset.
        micro_batches: Micro-batches per rank in the whole run.
        batch_size: Samples per micro-batch and rank.
        seed: Non-negative seed of the permutations.
        rank: This process.
        world_size: Number of processes.
        start: First micro-batch to yield; a callable is asked at each `__iter__`.
    """

    def __init__(
        self,
        num_items: int,
        micro_batches: int,
        batch_size: int = 1,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        start: int | Callable[[], int] = 0,
    ) -> None:
        self.num_items, self.micro_batches, self.batch_size = num_items, micro_batches, batch_size
        self.seed, self.rank, self.world_size, self.start = seed, rank, world_size, start
        self._epoch = -1
        self._permutation: NDArray[np.int64] = np.empty(0, dtype=np.int64)

    def __len__(self) -> int:
        """Samples of this rank in the whole run; Lightning counts from zero after a resume too."""
        return self.micro_batches * self.batch_size

    def __iter__(self) -> Iterator[int]:
        first = self.start() if callable(self.start) else self.start
        for micro_batch in range(first, self.micro_batches):
            position = (micro_batch * self.world_size + self.rank) * self.batch_size
            yield from map(self.item, range(position, position + self.batch_size))

    def item(self, position: int) -> int:
        """Item at a sample position of the run."""
        epoch, offset = divmod(position, self.num_items)
        if epoch != self._epoch:
            self._permutation = np.random.default_rng([self.seed, epoch]).permutation(self.num_items)
            self._epoch = epoch
        return int(self._permutation[offset])


def spread(available: Sequence[int], count: int) -> list[list[int]]:
    """Choose at most `count` windows, shared round robin among corpora and evenly spaced in each.

    Args:
        available: Windows in each corpus.
        count: Most windows to choose.

    Returns:
        For each corpus the ascending window indices chosen.
    """
    shares = [0] * len(available)
    while sum(shares) < min(count, sum(available)):
        for index, limit in enumerate(available):
            if shares[index] < limit and sum(shares) < count:
                shares[index] += 1
    return [
        [(2 * i + 1) * limit // (2 * share) for i in range(share)]
        for share, limit in zip(shares, available, strict=True)
    ]


def mix(windows: "Sequence[Dataset]", weights: Sequence[float], seed: int) -> "Dataset":
    """Interleave by weight until every corpus has been used up once; shorter ones repeat meanwhile."""
    from datasets import interleave_datasets

    if len(windows) == 1:
        return windows[0]
    shares = (np.asarray(weights) / np.sum(weights)).tolist()
    return interleave_datasets(list(windows), shares, seed, stopping_strategy="all_exhausted")


class ResumableLoader(DataLoader[Any]):
    """A loader whose order tells by itself where to go on.

    The two state methods hold nothing: they tell Lightning that resuming within an epoch is safe, which it
    otherwise doubts aloud.
    """

    def state_dict(self) -> dict[str, Any]:
        """Nothing; the position follows from the trainer's step count."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Accept what `state_dict` returned."""
