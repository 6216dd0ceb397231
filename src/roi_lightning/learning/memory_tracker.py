"""The memory of a training step, found by playing it through with tensors that have shapes and no storage.

The model is built and run as in training, forward and, unless the learner does without, backward, checkpointed where
training is. What is alive at any moment is counted storage by storage.
"""

from collections import Counter
from functools import partial
from typing import Any, Final
from unittest.mock import patch
from weakref import finalize

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM
from transformers.integrations import moe
from transformers.modeling_utils import PreTrainedModel
from typing_extensions import override

from roi_lightning.learning.base import MaskLearningModule
from roi_lightning.learning.losses import objective
from roi_lightning.learning.student import PrunedTensor, pruned_tensors, student_of
from roi_lightning.models.config import load_config
from roi_lightning.models.loading import cast_weights, enable_checkpointing, freeze

# What these attention implementations keep for the backward pass is alike, and none needs a device to be planned for.
_PLANNED_ATTENTION: Final = "sdpa"


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all storages that are alive, by what they are for.

    Attributes:
        peak: The largest number alive at once.
        peaks: That of each kind.
    """

    def __init__(self, vocabulary: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak, self.peaks = 0, Counter[str]()
        self._vocabulary, self._known, self._now = vocabulary, dict[int, tuple[str, int]](), Counter[str]()

    def count(self, tensor: Tensor, kind: str) -> None:
        """Count a tensor's storage until it is freed; one that is known becomes of this kind."""
        storage = tensor.untyped_storage()
        if id(storage) in self._known:
            self._forget(id(storage))
        else:
            finalize(storage, self._forget, id(storage))
        self._known[id(storage)] = (kind, storage.nbytes())
        self._now[kind] += storage.nbytes()
        self.peak = max(self.peak, self._now.total())
        self.peaks[kind] = max(self.peaks[kind], self._now[kind])

    def _forget(self, key: int) -> None:
        kind, size = self._known.pop(key)
        self._now[kind] -= size

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and id(leaf.untyped_storage()) not in self._known:
                is_loss = leaf.ndim and leaf.shape[-1] == self._vocabulary
                self.count(leaf, "loss" if is_loss else "activations")
        return out


def step_bytes(
    learner: MaskLearningModule,
    dtype: torch.dtype,
    windows: tuple[int, int],
    accumulating: bool,
    checkpointing: bool,
) -> LiveBytes:
    """Play through one micro-batch.

    Args:
        learner: Not yet built; only its settings are looked at.
        dtype: Of the frozen weights.
        windows: Windows of a micro-batch, and tokens of each.
        accumulating: Whether gradients of an earlier micro-batch of the same step are there.
        checkpointing: Whether activations are computed again in the backward pass.

    Returns:
        Bytes of `weights`, `learned`, `masked_weights`, `activations`, `loss` and `gradients`; optimizer states are
        not among them.
    """
    with FakeTensorMode():
        teacher = _language_model(learner, dtype)
        chosen = learner.choose(teacher)
        student = student_of(teacher, {layer.parameter for layer in chosen.pruned.values()})
        if checkpointing:
            enable_checkpointing(student)
        live = LiveBytes(teacher.config.get_text_config().vocab_size)
        for parameter in teacher.parameters():
            live.count(parameter, "weights")
        for tensor in pruned_tensors(chosen.pruned, chosen.pattern, teacher, student):
            live.count(tensor.student, "masked_weights")
            for kind, shape in learner.shapes(tensor.shape, tensor.pattern).items():
                tensor.learn(kind, torch.empty(shape), shape)
                live.count(tensor.learned[kind], "learned")
            take = partial(_take_gradient, live, tensor)
            if accumulating and learner.differentiates:
                take(tensor.student)
            tensor.student.register_post_accumulate_grad_hook(take)
        input_ids = torch.zeros(windows, dtype=torch.long)
        # Experts use a product of transformers: torch's knows its shape without storage in bfloat16 only.
        known = patch.object(moe, "_can_use_grouped_mm", lambda *_: False)
        with live, known, torch.set_grad_enabled(learner.differentiates):
            loss, _ = objective(student, teacher, input_ids, learner.distillation)
            if learner.differentiates:
                loss.backward()
    return live


def _take_gradient(live: LiveBytes, tensor: PrunedTensor, parameter: Tensor) -> None:
    """Stands for what a learner makes of a gradient."""
    for kind, learned in tensor.learned.items():
        gradient = torch.empty_like(learned)
        if learned.grad is None:
            live.count(gradient, "gradients")
        tensor.add_gradient(kind, gradient)
    parameter.grad = None


def _language_model(learner: MaskLearningModule, dtype: torch.dtype) -> PreTrainedModel:
    config = load_config(learner.source, learner.trust_remote_code)
    wanted = learner.attn_implementation
    options = {"attn_implementation": "eager" if wanted == "eager" else _PLANNED_ATTENTION}
    lm: PreTrainedModel = AutoModelForCausalLM.from_config(
        config, trust_remote_code=learner.trust_remote_code, **options
    )
    freeze(lm)
    cast_weights(lm, dtype)
    return lm
