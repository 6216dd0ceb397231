"""How far a run has come in streamed text, as its checkpoints hold it."""

from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed
from lightning.pytorch.utilities import rank_zero_info

from roi_lightning.data.streaming import Position


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
