"""Compile the decoder blocks of teacher and student in place, if a trial shows that it works here."""

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Final, Literal

import torch
import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_warn
from transformers.modeling_utils import PreTrainedModel

from roi_lightning.errors import reason
from roi_lightning.models.layers import decoder_blocks

Compile = Literal["auto", "none", "blocks"]

# Versions of the code that all blocks share: with gradients and without, of the first block, for other shapes.
_VERSIONS: Final = 64


class Compiler:
    """Compiles decoder blocks once, before the first step, or leaves a model as it is.

    Args:
        choice: `blocks`, `none`, or `auto`: blocks on a GPU with Triton.

    Attributes:
        compiled: Whether blocks are compiled, and the loss is to be.
    """

    def __init__(self, choice: Compile) -> None:
        self.choice = choice
        self.compiled = False
        self._tried = False

    def prepare(self, models: Sequence[PreTrainedModel], attempt: Callable[[], object]) -> None:
        """Compile the blocks of models, if asked for; nothing after the first call.

        Where that fails a warning says why, and the models stay as they are. Every rank has to call it, and
        all of them do the same.

        Args:
            models: On the device on which they compute.
            attempt: A step's passes forward and backward, which drops their gradients, where it fails too.
        """
        if self._tried:
            return
        self._tried = True
        device = next(models[0].parameters()).device
        if self.choice == "none" or (self.choice == "auto" and not _is_worth_it(device)):
            return
        torch._dynamo.config.recompile_limit = max(_VERSIONS, torch._dynamo.config.recompile_limit)
        blocks = [block for lm in models for block in lm.get_submodule(decoder_blocks(lm)).children()]
        for block in blocks:
            block.compile()
        self.compiled = True
        failure = _failure(attempt)
        worked = torch.tensor(failure is None, dtype=torch.int32, device=device)
        if dist.is_initialized():
            dist.all_reduce(worked, dist.ReduceOp.MIN)
        if not worked:
            self.compiled = False
            for block in blocks:
                block._compiled_call_impl = None
            rank_zero_warn(
                f"the models are not compiled, and steps take longer: {failure or 'a rank failed'}"
            )


def _is_worth_it(device: torch.device) -> bool:
    return device.type == "cuda" and find_spec("triton") is not None


def _failure(attempt: Callable[[], object]) -> str | None:
    """Why a model can't be compiled whole; None if it can."""
    try:
        with torch._dynamo.error_on_graph_break(True):
            attempt()
    except Exception as error:  # whatever a compiler may fail with
        return reason(error)
    return None
