"""Run the blocks of a decoder one at a time, on hidden states that are kept between them.

What a block is called with besides hidden states (positions, masks, a different one for each kind of
attention) is taken from real forward passes of the whole model, so that no architecture needs to be known.
"""

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, NoReturn

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_leaves, tree_map
from transformers.modeling_utils import PreTrainedModel

from roi_lightning.errors import UserError
from roi_lightning.models.layers import decoder_blocks
from roi_lightning.utils.progress import progress

_HIDDEN: Final = "hidden_states"
# What a call may hold and be repeated: anything else may carry something from one block to the next.
_PLAIN: Final = (Tensor, type(None), bool, int, float, str, torch.dtype)


@dataclass(frozen=True)
class BlockCall:
    """The arguments of one call of a block, except the hidden states."""

    positional: bool
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def __call__(self, block: Callable[..., Any], hidden: Tensor) -> Tensor:
        """Run a block on hidden states, on their device."""
        args, kwargs = _moved((self.args, self.kwargs), hidden.device)
        if self.positional:
            return _hidden_of(block(hidden, *args, **kwargs))
        return _hidden_of(block(*args, **{_HIDDEN: hidden}, **kwargs))


class BlockRunner:
    """A model's blocks, and the hidden states of every window between two of them.

    Args:
        lm: The model.
        windows: Token ids, int64 [count, seq_len].
        device: Where blocks run; one that is elsewhere is moved there for as long as it runs.
        offload_dir: A folder for the hidden states, [count, 1, seq_len, hidden] in the model's dtype; None keeps
            them in memory.

    Raises:
        UserError: If the model does more between its blocks than pass hidden states on.
    """

    def __init__(
        self, lm: PreTrainedModel, windows: Tensor, device: torch.device, offload_dir: Path | None = None
    ) -> None:
        self._name = decoder_blocks(lm)
        blocks = lm.get_submodule(self._name)
        assert isinstance(blocks, nn.ModuleList)
        self._blocks, self._device = blocks, device
        self.lm, self._windows = lm, windows
        self._lm_device = next(lm.get_input_embeddings().parameters()).device
        self._calls = self._all_calls()
        self._hidden = self._first_hidden(offload_dir)

    def __len__(self) -> int:
        return len(self._blocks)

    @property
    def windows(self) -> int:
        """How many windows there are."""
        return len(self._windows)

    def prefix(self, index: int) -> str:
        """What the names of a block's layers start with."""
        return f"{self._name}.{index}."

    @contextmanager
    def on_device(self, index: int) -> Iterator[None]:
        """Have a block on the device where it is to run, afterwards on its original one."""
        block = self._blocks[index]
        original = next(block.parameters()).device
        block.to(self._device)
        try:
            yield
        finally:
            block.to(original)

    def run(self, index: int, keep: bool) -> None:
        """Run a block on the hidden states of all windows, on its device.

        Args:
            index: Of the block.
            keep: Replace the hidden states by the block's output.
        """
        for window in range(len(self._hidden)):
            output = self._call(index, window)(self._blocks[index], self.hidden(window))
            if keep:
                self._hidden[window] = output

    def hidden(self, window: int) -> Tensor:
        """The hidden states of a window that are kept, [1, seq_len, hidden], where blocks run."""
        return self._hidden[window].to(self._device)

    def output(self, index: int, window: int, weights: Mapping[str, Tensor]) -> Tensor:
        """A block's output on the hidden states of a window, in the shape of these; the block is on its device.

        Args:
            index: Of the block.
            window: Of the window.
            weights: Take the place of parameters, by their names in the block; the output is differentiable in them.
        """
        block = self._blocks[index]

        def replaced(*args: Any, **kwargs: Any) -> Any:
            return functional_call(block, dict(weights), args, kwargs)

        return self._call(index, window)(replaced, self.hidden(window))

    def _call(self, index: int, window: int) -> BlockCall:
        return self._calls[window if len(self._calls) > 1 else 0][index]

    def _all_calls(self) -> list[list[BlockCall]]:
        """Per window, or once if the first and the last window give the same."""
        calls = self._record(self._windows[0])
        if len(self._windows) == 1 or _same(calls, self._record(self._windows[-1])):
            return [calls]
        rest = progress(list(self._windows[1:]), "recording what blocks are called with")
        return [calls, *map(self._record, rest)]

    def _record(self, window: Tensor) -> list[BlockCall]:
        """One forward pass of the whole model, every block on the device where it is to run."""
        calls: list[BlockCall] = []
        last: Tensor | None = None
        moved_blocks = ExitStack()

        def before(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            hidden, call = _split_hidden(args, kwargs)
            self._check(hidden, last, call)
            calls.append(call)
            moved_blocks.enter_context(self.on_device(len(calls) - 1))
            return _moved((args, kwargs), self._device)

        def after(_block: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
            nonlocal last
            moved_blocks.close()
            output = _moved(output, self._lm_device)
            last = _hidden_of(output)
            return output

        with moved_blocks, ExitStack() as hooks:
            for block in self._blocks:
                hooks.callback(block.register_forward_pre_hook(before, with_kwargs=True).remove)
                hooks.callback(block.register_forward_hook(after).remove)
            self._forward(window)
        if len(calls) != len(self._blocks):
            self._refuse(f"calls {len(calls)} of its {len(self._blocks)} blocks")
        return calls

    def _check(self, hidden: Tensor, last: Tensor | None, call: BlockCall) -> None:
        # Equal even where both are NaN: that is another error, raised when a layer receives them.
        if last is not None and not torch.allclose(hidden, last, rtol=0, atol=0, equal_nan=True):
            self._refuse("changes the hidden states between its blocks")
        for leaf in tree_leaves((call.args, call.kwargs)):
            if not isinstance(leaf, _PLAIN):
                self._refuse(f"hands a {type(leaf).__name__} from block to block")

    def _refuse(self, what: str) -> NoReturn:
        raise UserError(
            f"{type(self.lm).__name__} {what}; methods that read text can't follow it block by block: "
            "use magnitude, or Wanda with --activations dense --device cpu (in fit: the prior 'activation')"
        )

    def _first_hidden(self, offload_dir: Path | None) -> Tensor:
        """What the first block receives, for all windows: all that comes before it is run, nothing after."""
        found: list[Tensor] = []

        def stop(_block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            found.append(_split_hidden(args, kwargs)[0])
            raise _ReachedError

        hidden: Tensor | None = None
        handle = self._blocks[0].register_forward_pre_hook(stop, with_kwargs=True)
        try:
            for i, window in enumerate(self._windows):
                with suppress(_ReachedError):
                    self._forward(window)
                one = found.pop()
                if hidden is None:
                    shape = (len(self._windows), *one.shape)
                    new = torch.empty if offload_dir is None else partial(on_disk, folder=offload_dir)
                    hidden = new(shape, dtype=one.dtype)
                hidden[i] = one
        finally:
            handle.remove()
        assert hidden is not None
        return hidden

    def _forward(self, window: Tensor) -> None:
        self.lm.base_model(input_ids=window.unsqueeze(0).to(self._lm_device), use_cache=False)


class _ReachedError(Exception):
    """The first block was reached."""


def _split_hidden(args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Tensor, BlockCall]:
    """Separate the hidden states from the other arguments of a block."""
    if args:
        return args[0], BlockCall(True, tuple(args[1:]), dict(kwargs))
    rest = {name: value for name, value in kwargs.items() if name != _HIDDEN}
    return kwargs[_HIDDEN], BlockCall(False, (), rest)


def _hidden_of(output: Any) -> Tensor:
    """The hidden states among what a block returns: alone, or the first of several."""
    hidden: Tensor = output if isinstance(output, Tensor) else output[0]
    return hidden


def _moved(tree: Any, device: torch.device) -> Any:
    return tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, tree)


def on_disk(shape: tuple[int, ...], dtype: torch.dtype, folder: Path) -> Tensor:
    """An uninitialised tensor in a nameless file of a folder, which goes with the tensor.

    Raises:
        UserError: If the disk refuses.
    """
    size = torch.Size(shape).numel()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder) as file:
            # Reserved now: a disk that fills up under a mapped file kills the process.
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, size * dtype.itemsize)
            return torch.from_file(file.name, shared=True, size=size, dtype=dtype).view(shape)
    except (OSError, RuntimeError) as error:
        raise UserError(
            f"{str(folder)!r} can't be written: {error}; make room or choose another folder"
        ) from error


def _same(one: list[BlockCall], other: list[BlockCall]) -> bool:
    leaves = [tree_leaves([(call.args, call.kwargs) for call in calls]) for calls in (one, other)]
    return len(leaves[0]) == len(leaves[1]) and all(map(_same_leaf, *leaves))


def _same_leaf(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and torch.equal(one, other)
    return one is other or (type(one) is type(other) and bool(one == other))
