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
from typing import Any, Final, NoReturn

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from transformers.modeling_utils import PreTrainedModel

from roi_lightning.errors import UserError
from roi_lightning.progress import progress
from roi_lightning.prunable import decoder_blocks

_HIDDEN: Final = "hidden_states"
# What a call may hold and be made again: anything else may carry something from one block to the next.
_PLAIN: Final = (Tensor, type(None), bool, int, float, str, torch.dtype)


@dataclass(frozen=True)
class Call:
    """What one block was called with, hidden states aside."""

    positional: bool
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def __call__(self, block: nn.Module, hidden: Tensor) -> Tensor:
        """Run a block on hidden states, on their device."""
        args, kwargs = _moved((self.args, self.kwargs), hidden.device)
        if self.positional:
            return first(block(hidden, *args, **kwargs))
        return first(block(*args, **{_HIDDEN: hidden}, **kwargs))


class Decoder:
    """A model's blocks, and the hidden states of every window between two of them.

    Args:
        lm: The model.
        windows: Token ids, int64 [count, seq_len].
        device: Where blocks run; a block that lies elsewhere visits it.
        spill: A folder for the hidden states, [count, 1, seq_len, hidden] in the model's dtype; None for memory.

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
        self._home = next(lm.get_input_embeddings().parameters()).device
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
        rest = progress(list(self._windows[1:]), "recording what blocks are called with")
        return [calls, *map(self._record, rest)]

    def _record(self, window: Tensor) -> list[Call]:
        """One forward pass of the whole model, every block on the device where it is to run."""
        calls: list[Call] = []
        last: Tensor | None = None
        visits = ExitStack()

        def before(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            hidden, call = split_hidden(args, kwargs)
            self._check(hidden, last, call)
            calls.append(call)
            visits.enter_context(self.visiting(len(calls) - 1))
            return _moved((args, kwargs), self.device)

        def after(_block: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
            nonlocal last
            visits.close()
            output = _moved(output, self._home)
            last = first(output)
            return output

        with visits, ExitStack() as hooks:
            for block in self.blocks:
                hooks.callback(block.register_forward_pre_hook(before, with_kwargs=True).remove)
                hooks.callback(block.register_forward_hook(after).remove)
            self._forward(window)
        if len(calls) != len(self.blocks):
            self._refuse(f"calls {len(calls)} of its {len(self.blocks)} blocks")
        return calls

    def _check(self, hidden: Tensor, last: Tensor | None, call: Call) -> None:
        # Equal even where both are not numbers: that is another error, told when a layer meets them.
        if last is not None and not torch.allclose(hidden, last, rtol=0, atol=0, equal_nan=True):
            self._refuse("changes the hidden states between its blocks")
        for leaf in tree_leaves((call.args, call.kwargs)):
            if not isinstance(leaf, _PLAIN):
                self._refuse(f"hands a {type(leaf).__name__} from block to block")

    def _refuse(self, what: str) -> NoReturn:
        raise UserError(
            f"{type(self._lm).__name__} {what}; Wanda and SparseGPT can't follow it block by block: "
            "use magnitude, or the prior 'activation' in fit"
        )

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
        self._lm.base_model(input_ids=window.unsqueeze(0).to(self._home), use_cache=False)


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


def _moved(tree: Any, device: torch.device) -> Any:
    return tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, tree)


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
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, size * dtype.itemsize)
            return torch.from_file(file.name, shared=True, size=size, dtype=dtype).view(shape)
    except (OSError, RuntimeError) as error:
        raise UserError(
            f"hidden states can't be kept in {str(spill)!r}: {error}; give another --spill"
        ) from error


def _same(one: list[Call], other: list[Call]) -> bool:
    leaves = [tree_leaves([(call.args, call.kwargs) for call in calls]) for calls in (one, other)]
    return len(leaves[0]) == len(leaves[1]) and all(map(_same_leaf, *leaves))


def _same_leaf(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and torch.equal(one, other)
    return one is other or (type(one) is type(other) and bool(one == other))
