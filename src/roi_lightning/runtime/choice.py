"""Which of several ways to multiply is the quickest for so many rows, by a few that were measured."""

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import inf

# Seconds of every way that can go so many rows, by their number.
Times = Mapping[int, Mapping[str, float]]


@dataclass(frozen=True)
class Choice:
    """A way for every number of rows.

    Attributes:
        starts: From how many rows on; the first is 0, the others rise.
        ways: Which way is taken from there to before the next start.
    """

    starts: tuple[int, ...]
    ways: tuple[str, ...]

    def way(self, rows: int) -> str:
        """The way for so many rows."""
        return self.ways[bisect_right(self.starts, rows) - 1]


def choose(times: Times) -> Choice:
    """The quickest way at every measured number of rows, and between two of them the one that lines through both say.

    Args:
        times: Of one number of rows at least. The quickest at the last is taken beyond it.
    """
    counts = sorted(times)
    best = {rows: min(times[rows], key=times[rows].__getitem__) for rows in counts}
    starts, ways = [0], [best[counts[0]]]
    for before, after in pairwise(counts):
        if best[after] != best[before]:
            starts.append(_crossing(times, before, after, best[before], best[after]))
            ways.append(best[after])
    return Choice(tuple(starts), tuple(ways))


def _crossing(times: Times, before: int, after: int, old: str, new: str) -> int:
    """The first number of rows where `new` is quicker than `old`, if both change evenly in between."""
    lead, lag = (times[rows].get(new, inf) - times[rows].get(old, inf) for rows in (before, after))
    if lead == inf:  # not possible before
        return after
    if lag == -inf:  # the old way ends
        return before + 1
    return before + 1 + int((after - before - 1) * lead / (lead - lag))
