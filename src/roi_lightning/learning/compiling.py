"""Compile the decoder blocks of teacher and student in place, if a trial shows that it works here."""

import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from typing import Final, Literal

import torch
import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_warn
from torch import nn
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
        worth_it = device.type == "cuda" and find_spec("triton") is not None
        if self.choice == "none" or (self.choice == "auto" and not worth_it):
            return
        blocks = [block for lm in models for block in lm.get_submodule(decoder_blocks(lm)).children()]
        failure = self._failure(blocks, attempt)
        self.compiled = _on_all_ranks(failure is None, device)
        if not self.compiled:
            for block in blocks:
                block._compiled_call_impl = None
            rank_zero_warn(
                f"the models are not compiled, and steps take longer: {failure or 'a rank failed'}"
            )

    def eager(self) -> AbstractContextManager[object]:
        """A context in which models run uncompiled: to generate, in sizes that change with every token."""
        return torch.compiler.set_stance("force_eager") if self.compiled else nullcontext()

    def _failure(self, blocks: Iterable[nn.Module], attempt: Callable[[], object]) -> str | None:
        """Why blocks can't be compiled, each whole; None if they are."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # compilers say much that no user can act on
            try:
                torch._dynamo.config.recompile_limit = max(_VERSIONS, torch._dynamo.config.recompile_limit)
                for block in blocks:
                    block.compile()
                self.compiled = True
                with torch._dynamo.error_on_graph_break(True):
                    attempt()
            except Exception as error:  # whatever a compiler may fail with
                return reason(error)
        return None


def _on_all_ranks(worked: bool, device: torch.device) -> bool:
    everywhere = torch.tensor(worked, dtype=torch.int32, device=device)
    if dist.is_initialized():
        dist.all_reduce(everywhere, dist.ReduceOp.MIN)
    return bool(everywhere)
