"""Can a run fit into memory at all: asked before anything is read."""

import os
from pathlib import Path
from typing import Final

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import ModelParallelStrategy

from roi_lightning.errors import UserError
from roi_lightning.learner import MaskLearner
from roi_lightning.planning import Planner

_CONTAINER_LIMIT: Final = Path("/sys/fs/cgroup/memory.max")


def require_memory(learner: MaskLearner, trainer: Trainer) -> None:
    """Refuse a run whose weights, logits, gradients and optimizer states alone are more than its device can hold.

    Args:
        learner: Not yet built.
        trainer: The one that will run it.

    Raises:
        UserError: Saying how much is needed, how much there is, and where to look for what would fit.
    """
    planner = Planner(learner)
    fixed = planner.weights + planner.learned * (2 * torch.float32.itemsize + planner.state_bytes)
    ranks = trainer.world_size if isinstance(trainer.strategy, ModelParallelStrategy) else 1
    limit = memory_of(trainer.strategy.root_device)
    if fixed / ranks > limit:
        raise UserError(
            f"weights, logits, gradients and optimizer states take {fixed / ranks / 1e9:.1f} GB a device, which has "
            f"{limit / 1e9:.1f} GB; python -m roi_lightning plan --fit_in {limit // 10**9}GB tells what would fit, "
            "and overlays/fsdp2.yaml spreads them over several devices"
        )


def memory_of(device: torch.device) -> int:
    """Bytes that a device has; of a processor, what this machine or its container may use."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    installed = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    allowed = _CONTAINER_LIMIT.read_text().strip() if _CONTAINER_LIMIT.is_file() else "max"
    return min(installed, int(allowed)) if allowed.isdigit() else installed
