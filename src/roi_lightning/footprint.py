"""The memory of a training step, found by playing it through with tensors that have shapes and no storage.

The model is built and run as in training, forward and backward, checkpointed where training is; only the draws
of the weights are stood in for, since samplers keep nothing and work in small pieces. What is alive at any moment
is counted storage by storage.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, cast
from weakref import finalize

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM
from transformers.modeling_utils import PreTrainedModel
from typing_extensions import override

from roi_lightning.experts import SplitExperts, split_experts
from roi_lightning.language_model import cast_weights, enable_checkpointing, freeze, load_config
from roi_lightning.learner import MaskLearner
from roi_lightning.loss import kl_sum, next_token_logits, nll_sum
from roi_lightning.prunable import prunable_layers
from roi_lightning.sparse_linear import LayerState, in_mode

# What these attention implementations keep for the backward pass is alike, and none needs a device to be planned for.
_PLANNED_ATTENTION: Final = "sdpa"


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all storages that are alive, by what they are for.

    Attributes:
        most: The most that were alive at once.
        most_of: The most of each kind.
    """

    def __init__(self, vocabulary: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.most, self.most_of, self.kind = 0, Counter[str](), "activations"
        self._vocabulary, self._known, self._now = vocabulary, dict[int, tuple[str, int]](), Counter[str]()

    def count(self, tensor: Tensor, kind: str | None = None) -> None:
        """Count a tensor's storage until it is freed, unless it is known."""
        storage = tensor.untyped_storage()
        if id(storage) in self._known:
            return
        if kind is None:
            wide = tensor.ndim > 0 and tensor.shape[-1] == self._vocabulary
            kind = "loss" if wide and self.kind == "activations" else self.kind
        self._known[id(storage)] = (kind, storage.nbytes())
        finalize(storage, self._forget, id(storage))
        self._now[kind] += storage.nbytes()
        self.most = max(self.most, self._now.total())
        self.most_of[kind] = max(self.most_of[kind], self._now[kind])

    def _forget(self, key: int) -> None:
        kind, size = self._known.pop(key)
        self._now[kind] -= size

    @contextmanager
    def counting(self, kind: str) -> Iterator[None]:
        """Whatever is made within is of this kind."""
        before, self.kind = self.kind, kind
        try:
            yield
        finally:
            self.kind = before

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self.count(leaf)
        return out


class _Drawn(torch.autograd.Function):
    """Stands for a masked weight: as much memory each way, and no work."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, learned: Tensor, live: LiveBytes) -> Tensor:
        ctx.learned, ctx.live = learned.detach(), live
        with live.counting("masked_weights"):
            return torch.empty_like(weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor, None]:
        with ctx.live.counting("gradients"):
            return None, torch.empty_like(ctx.learned), None


def step_bytes(
    learner: MaskLearner, dtype: torch.dtype, windows: tuple[int, int], again: bool, checkpointing: bool
) -> LiveBytes:
    """Play through one micro-batch.

    Args:
        learner: Not yet built; only its settings are looked at.
        dtype: Of the frozen weights.
        windows: Windows of a micro-batch, and tokens of each.
        again: Whether gradients of an earlier micro-batch of the same step are there.
        checkpointing: Whether activations are computed again in the backward pass.

    Returns:
        Bytes of `weights`, `learned`, `masked_weights`, `activations`, `loss` and `gradients`; optimizer states are
        not among them.
    """
    with FakeTensorMode():
        lm = _language_model(learner, dtype)
        if checkpointing:
            enable_checkpointing(lm)
        layers = learner.attach(lm, prunable_layers(lm, learner.targets, learner.ignore))
        live = LiveBytes(lm.config.get_text_config().vocab_size)
        for layer in layers.values():
            learned = cast(Tensor, getattr(layer, layer.learned))
            live.count(learned, "learned")
            if again:
                learned.grad = torch.empty_like(learned)
                live.count(learned.grad, "gradients")
            layer.drawn_weight = partial(_Drawn.apply, layer.weight, learned, live)  # type: ignore[method-assign]
        for parameter in lm.parameters():
            live.count(parameter, "weights")
        input_ids = torch.zeros(windows, dtype=torch.long)
        state = next(iter(layers.values())).state
        with live, in_mode(state, "sample"):
            loss = objective(lm, input_ids, state, learner.distillation)
            loss.backward()
    return live


def _language_model(learner: MaskLearner, dtype: torch.dtype) -> PreTrainedModel:
    config = load_config(learner.source, learner.trust_remote_code)
    wanted = learner.attn_implementation
    options = {"attn_implementation": "eager" if wanted == "eager" else _PLANNED_ATTENTION}
    lm = AutoModelForCausalLM.from_config(config, trust_remote_code=learner.trust_remote_code, **options)
    split_experts(lm)
    for module in lm.modules():
        if isinstance(module, SplitExperts):
            module.shares = partial(_equal_shares, module.count)  # type: ignore[method-assign]
    freeze(lm)
    cast_weights(lm, dtype)
    return cast(PreTrainedModel, lm)


def _equal_shares(count: int, top_k_index: Tensor) -> list[int]:
    """Stands for the choices of a router: every expert is sent as many tokens as the next."""
    least, more = divmod(top_k_index.numel(), count)
    return [least + (i < more) for i in range(count)]


def objective(lm: PreTrainedModel, input_ids: Tensor, state: LayerState, distillation: float) -> Tensor:
    """What a learner minimises, in tensors of the same sizes."""
    dense = None
    if distillation:
        with in_mode(state, "dense"), torch.no_grad():
            dense = next_token_logits(lm, input_ids)
    logits = next_token_logits(lm, input_ids)
    if dense is None:
        return nll_sum(logits, input_ids)
    kl = kl_sum(logits, dense, input_ids)
    return kl if distillation == 1 else kl + nll_sum(logits, input_ids)
