"""The blocks of a decoder, run one at a time on hidden states that are kept between them.

What a block is called with besides hidden states (positions, masks, a different one for each kind of
attention) is taken from real forward passes of the whole model, so that no architecture needs to be known.
"""

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from transformers.modeling_utils import PreTrainedModel

from roi_lightning.errors import UserError
from roi_lightning.prunable import decoder_blocks

_HIDDEN: Final = "hidden_states"


@dataclass(frozen=True)
class Call:
    """What one block was called with, hidden states aside."""

    positional: bool
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def __call__(self, block: nn.Module, hidden: Tensor) -> Tensor:
        """Run a block on hidden states, on their device."""
        args, kwargs = tree_map(
            lambda leaf: leaf.to(hidden.device) if isinstance(leaf, Tensor) else leaf,
            (self.args, self.kwargs),
        )
        if self.positional:
            return first(block(hidden, *args, **kwargs))
        return first(block(*args, **{_HIDDEN: hidden}, **kwargs))


class Decoder:
    """A model's blocks, and the hidden states of every window between two of them.

    Args:
        lm: The model.
        windows: Token ids, int64 [count, seq_len].
        device: Where blocks run; a block that lies elsewhere visits it.
        spill: A folder for the hidden states, [count, seq_len, hidden] in the model's dtype; None for memory.

    Raises:
        UserError: If the model does more between its blocks than hand hidden states on.
    """

    def __init__(
        self, lm: PreTrainedModel, windows: Tensor, device: torch.device, spill: Path | None = None
    ) -> None:
        self.name = decoder_blocks(lm)
        blocks = lm.get_submodule(self.name)
        assert isinstance(blocks, nn.ModuleList)
        self.blocks, self.device = blocks, device
        self._lm, self._windows = lm, windows
        self._calls = self._all_calls()
        self.hidden = self._first_hidden(spill)

    def prefix(self, index: int) -> str:
        """What the names of a block's layers start with."""
        return f"{self.name}.{index}."

    @contextmanager
    def visiting(self, index: int) -> Iterator[nn.Module]:
        """A block on the device where it is to run, back home afterwards."""
        block = self.blocks[index]
        home = next(block.parameters()).device
        block.to(self.device)
        try:
            yield block
        finally:
            block.to(home)

    def run(self, index: int, window: int) -> Tensor:
        """The output of a block, on its device, for the hidden states of one window."""
        calls = self._calls[window if len(self._calls) > 1 else 0]
        return calls[index](self.blocks[index], self.hidden[window].to(self.device))

    def _all_calls(self) -> list[list[Call]]:
        """Per window, or once if the first and the last window give the same."""
        calls = self._record(self._windows[0])
        if len(self._windows) == 1 or _same(calls, self._record(self._windows[-1])):
            return [calls]
        return [calls, *(self._record(window) for window in self._windows[1:])]

    def _record(self, window: Tensor) -> list[Call]:
        calls: list[Call] = []
        last: Tensor | None = None

        def before(_block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            hidden, call = split_hidden(args, kwargs)
            if last is not None and not torch.equal(hidden, last):
                raise UserError(
                    f"{type(self._lm).__name__} changes the hidden states between its blocks; "
                    "one-shot pruning by activations does not support it"
                )
            calls.append(call)

        def after(_block: nn.Module, _args: Any, output: Any) -> None:
            nonlocal last
            last = first(output)

        with ExitStack() as hooks:
            for block in self.blocks:
                hooks.callback(block.register_forward_pre_hook(before, with_kwargs=True).remove)
                hooks.callback(block.register_forward_hook(after).remove)
            self._forward(window)
        return calls

    def _first_hidden(self, spill: Path | None) -> Tensor:
        """What the first block is given, for all windows: all that comes before it is run, nothing after."""
        found: list[Tensor] = []

        def stop(_block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            found.append(split_hidden(args, kwargs)[0])
            raise _ReachedError

        hidden: Tensor | None = None
        handle = self.blocks[0].register_forward_pre_hook(stop, with_kwargs=True)
        try:
            for i, window in enumerate(self._windows):
                with suppress(_ReachedError):
                    self._forward(window)
                one = found.pop()
                if hidden is None:
                    hidden = allocate((len(self._windows), *one.shape), one.dtype, spill)
                hidden[i] = one
        finally:
            handle.remove()
        assert hidden is not None
        return hidden

    def _forward(self, window: Tensor) -> None:
        home = next(self._lm.get_input_embeddings().parameters()).device
        self._lm.base_model(input_ids=window.unsqueeze(0).to(home), use_cache=False)


class _ReachedError(Exception):
    """The first block was reached."""


def split_hidden(args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Tensor, Call]:
    """Part the hidden states from what else a block is called with."""
    if args:
        return args[0], Call(True, tuple(args[1:]), dict(kwargs))
    rest = {name: value for name, value in kwargs.items() if name != _HIDDEN}
    return kwargs[_HIDDEN], Call(False, (), rest)


def first(output: Any) -> Tensor:
    """The hidden states among what a block returns: alone, or ahead of others."""
    hidden: Tensor = output if isinstance(output, Tensor) else output[0]
    return hidden


def allocate(shape: tuple[int, ...], dtype: torch.dtype, spill: Path | None) -> Tensor:
    """An uninitialised tensor in memory, or on the disk and paged in when touched.

    Args:
        shape: Its shape.
        dtype: Its dtype.
        spill: A folder for the file, which has no name once this returns and is gone with the tensor.

    Raises:
        UserError: If the disk has no room for it.
    """
    if spill is None:
        return torch.empty(shape, dtype=dtype)
    size = torch.Size(shape).numel()
    try:
        spill.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=spill, prefix="hidden_states-") as file:
            # Reserved now: a disk that fills up under a mapped file kills the process.
            os.posix_fallocate(file.fileno(), 0, size * dtype.itemsize)
            return torch.from_file(file.name, shared=True, size=size, dtype=dtype).view(shape)
    except (OSError, RuntimeError) as error:
        raise UserError(f"hidden states can't be kept in {str(spill)!r}: {error}") from error


def _same(one: list[Call], other: list[Call]) -> bool:
    leaves = [tree_leaves([(call.args, call.kwargs) for call in calls]) for calls in (one, other)]
    return len(leaves[0]) == len(leaves[1]) and all(map(_same_leaf, *leaves))


def _same_leaf(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and torch.equal(one, other)
    return one is other or (type(one) is type(other) and bool(one == other))
