"""Which windows each rank trains on, as a pure function of the seed and the micro-batch number.

Nothing about the order is state: an interrupted run and its continuation see together exactly what an
uninterrupted run would have seen, on any number of ranks.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Sampler

if TYPE_CHECKING:
    from datasets import Dataset


@dataclass(frozen=True)
class ResumableSampler(Sampler[int]):
    """Shuffled passes over `num_items`, cut to the length of a run and divided over ranks.

    Sample position p, counted over all ranks from the start of the run, is item p % num_items of pass
    p // num_items; every pass has its own permutation. In micro-batch k, rank r of w takes the positions
    from (k * w + r) * batch_size up to (k * w + r + 1) * batch_size.

    Attributes:
        num_items: Size of the dataset.
        micro_batches: Micro-batches per rank in the whole run.
        batch_size: Samples per micro-batch and rank.
        seed: Non-negative seed of the permutations.
        rank: This process.
        world_size: Number of processes.
        start: First micro-batch to yield; a callable is called at each `__iter__`.
    """

    num_items: int
    micro_batches: int
    batch_size: int = 1
    seed: int = 0
    rank: int = 0
    world_size: int = 1
    start: int | Callable[[], int] = 0

    def __len__(self) -> int:
        """Samples of this rank in the whole run; Lightning counts from zero after a resume too."""
        return self.micro_batches * self.batch_size

    def __iter__(self) -> Iterator[int]:
        first = self.start() if callable(self.start) else self.start
        for micro_batch in range(first, self.micro_batches):
            position = (micro_batch * self.world_size + self.rank) * self.batch_size
            for sample in range(position, position + self.batch_size):
                epoch, offset = divmod(sample, self.num_items)
                yield int(_permutation(self.num_items, self.seed, epoch)[offset])


@lru_cache(maxsize=1)
def _permutation(num_items: int, seed: int, epoch: int) -> NDArray[np.int64]:
    return np.random.default_rng([seed, epoch]).permutation(num_items)


def evenly_spaced(available: Sequence[int], count: int) -> list[list[int]]:
    """Choose at most `count` windows, shared round robin among corpora and evenly spaced in each.

    Args:
        available: Windows in each corpus.
        count: Windows to choose, if there are so many.

    Returns:
        For each corpus the ascending window indices chosen.
    """
    chosen = [0] * len(available)
    while sum(chosen) < min(count, sum(available)):
        for index, limit in enumerate(available):
            if chosen[index] < limit and sum(chosen) < count:
                chosen[index] += 1
    return [
        [(2 * i + 1) * limit // (2 * part) for i in range(part)]
        for part, limit in zip(chosen, available, strict=True)
    ]


def mix(windows: "Sequence[Dataset]", weights: Sequence[float], seed: int) -> "Dataset":
    """Interleave by weight until every corpus has been used up once; shorter ones repeat meanwhile."""
    from datasets import interleave_datasets

    if len(windows) == 1:
        return windows[0]
    probabilities = (np.asarray(weights) / np.sum(weights)).tolist()
    return interleave_datasets(list(windows), probabilities, seed, stopping_strategy="all_exhausted")


class ResumableLoader(DataLoader[Any]):
    """A loader whose position follows from the trainer's step count.

    Without the two methods Lightning warns that resuming within an epoch is not safe.
    """

    def state_dict(self) -> dict[str, Any]:
        """Nothing."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Accept what `state_dict` returned."""
