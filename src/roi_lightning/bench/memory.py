"""What memory gives: the rate at which bytes that no cache holds can be read."""

import os
from typing import Final

import torch

# Enough for caches that the operating system tells nothing of, and on a GPU for the time of a launch not to count.
_LEAST: Final = {"cpu": 256 << 20, "cuda": 1 << 30}
_TIMES_THE_CACHE: Final = 4


def cold_bytes(device: torch.device) -> int:
    """How many bytes to walk over, so that none is in a cache when the walk comes by again."""
    return max(_LEAST[device.type], _TIMES_THE_CACHE * _last_cache(device))


def _last_cache(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    name = "SC_LEVEL3_CACHE_SIZE"
    return max(0, os.sysconf(name)) if name in os.sysconf_names else 0


class Reading:
    """A task that reads a buffer far larger than the caches, once.

    Attributes:
        nbytes: What it reads.
    """

    def __init__(self, device: torch.device) -> None:
        self._buffer = torch.ones(cold_bytes(device) // 4, device=device)
        self.nbytes = self._buffer.nbytes

    def __call__(self) -> torch.Tensor:
        """Read it all."""
        return self._buffer.sum()
