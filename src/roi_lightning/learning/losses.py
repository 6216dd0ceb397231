"""What training minimises, in fp32, a slice of tokens at a time.

With `labels` (see `data.packing.as_batch`) only some tokens count, and every window counts as much as another, as it
does without: the loss does not depend on how windows are divided over micro-batches and ranks, and the weights of
corpora hold. Perplexities are means over tokens.

The logits of a model come in its own dtype; converted to fp32 all at once they would be the largest tensor of a step
(a vocabulary of 152 k times 4,096 tokens is 2.5 GB), so each slice is converted, used and dropped, in the
backward pass too.
"""

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, Final
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import masking_utils
from transformers.modeling_utils import PreTrainedModel

from roi_lightning.data.packing import IGNORED

# In fp32. A CPU's allocator returns larger blocks to the system, and waits for new ones the next time; on a GPU
# smaller ones take longer to launch than to compute. Compiled code has no fp32 logits in memory.
_SLICE_BYTES: Final = 24 << 20
_GPU_SLICE_BYTES: Final = 96 << 20
_COMPILED_SLICE_BYTES: Final = 1536 << 20

# The fp32 sum over some tokens, of their logits and further constants of each.
_Loss = Callable[..., Tensor]


def objective(
    student: PreTrainedModel,
    teacher: PreTrainedModel,
    input_ids: Tensor,
    distillation: float,
    labels: Tensor | None = None,
    compiled: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """(1 − distillation) × cross-entropy + distillation × KL(dense ‖ masked), in nats per predicted token.

    Args:
        student: The masked model.
        teacher: The dense one.
        input_ids: [batch, seq_len] token ids, seq_len of at least 2.
        distillation: From 0 to 1; above 0 it costs a forward pass of the dense model.
        labels: Like `input_ids`, -100 where a token does not count; None where all do.
        compiled: Whether what follows the models' logits is compiled.

    Returns:
        The loss, fp32 and differentiable, and the divergence in it; None without distillation.
    """
    count, weights = input_ids[:, 1:].numel(), None if labels is None else window_weights(labels)
    if not distillation:
        logits = next_token_logits(student, input_ids)
        return nll_sum(logits, input_ids, weights, compiled) / count, None
    with torch.no_grad():
        target = next_token_logits(teacher, input_ids)
    logits = next_token_logits(student, input_ids)
    kl = kl_sum(logits, target, input_ids, weights, compiled) / count
    if distillation == 1:
        return kl, kl
    nll = nll_sum(logits, input_ids, weights, compiled) / count
    return nll + distillation * (kl - nll), kl


def window_weights(labels: Tensor) -> Tensor:
    """What each predicted token counts for: alike in a window, every window as much as another.

    Args:
        labels: [batch, seq_len], -100 where a token does not count.

    Returns:
        fp32 [batch, seq_len - 1]; their mean is 1 if every window has a token that counts.
    """
    counted = (labels[:, 1:] != IGNORED).float()
    return counted * counted.shape[1] / counted.sum(1, keepdim=True).clamp(min=1)


def next_token_nll(
    lm: PreTrainedModel, input_ids: Tensor, labels: Tensor | None = None
) -> tuple[Tensor, Tensor | int]:
    """Sum of the negative log-likelihood of every token but the first of each window.

    Args:
        lm: Any causal language model.
        input_ids: [batch, seq_len] token ids, seq_len of at least 2.
        labels: Like `input_ids`, -100 where a token does not count; None where all do.

    Returns:
        The fp32 sum in nats, differentiable, and the number of predicted tokens, those that count.
    """
    targets = input_ids if labels is None else labels
    count = input_ids[:, 1:].numel() if labels is None else (labels[:, 1:] != IGNORED).sum()
    return nll_sum(next_token_logits(lm, input_ids), targets), count


def next_token_logits(lm: PreTrainedModel, input_ids: Tensor) -> Tensor:
    """[batch * seq_len, vocabulary] in the model's dtype; those of a window's last token predict nothing.

    Args:
        lm: Any causal language model.
        input_ids: [batch, seq_len] token ids.
    """
    # Or transformers would ask, in every pass, whether positions begin anew in a window: a GPU is waited for.
    with patch.object(masking_utils, "find_packed_sequence_indices", lambda position_ids: None, create=True):
        logits: Tensor = lm(input_ids=input_ids, use_cache=False).logits
    return logits.flatten(0, 1)


def nll_sum(logits: Tensor, labels: Tensor, weights: Tensor | None = None, compiled: bool = False) -> Tensor:
    """Negative log-likelihood of the text, summed over predicted tokens.

    Args:
        logits: As `next_token_logits` gives them.
        labels: [batch, seq_len] token ids, -100 where a token does not count.
        weights: fp32 [batch, seq_len - 1], of the predicted tokens; None for 1.
        compiled: As for `objective`.

    Returns:
        fp32 scalar in nats.
    """
    return _sum_slices(_nll, compiled, logits, _targets(labels), *_padded(weights))


def kl_sum(
    logits: Tensor, dense: Tensor, input_ids: Tensor, weights: Tensor | None = None, compiled: bool = False
) -> Tensor:
    """KL(dense ‖ masked) of the next-token distributions, summed over predicted tokens.

    Args:
        logits: Of the masked model, differentiable, as `next_token_logits` gives them.
        dense: Of the dense model, the same shape; a constant.
        input_ids: [batch, seq_len] token ids; they only say which positions count.
        weights: As for `nll_sum`.
        compiled: As for `objective`.

    Returns:
        fp32 scalar in nats.
    """
    return _sum_slices(_kl, compiled, logits, dense, _targets(input_ids), *_padded(weights))


def _targets(labels: Tensor) -> Tensor:
    # The last token of a window predicts nothing; cutting it off instead would copy the logits.
    return F.pad(labels[:, 1:], (0, 1), value=IGNORED).flatten()


def _padded(weights: Tensor | None) -> tuple[Tensor, ...]:
    return () if weights is None else (F.pad(weights, (0, 1)).flatten(),)


def _sum_slices(function: _Loss, compiled: bool, logits: Tensor, *constants: Tensor) -> Tensor:
    size = _SLICE_BYTES if logits.device.type == "cpu" else _GPU_SLICE_BYTES
    if compiled:
        function, size = _compiled(function), _COMPILED_SLICE_BYTES
    tokens = max(1, size // (logits.shape[1] * torch.float32.itemsize))
    total: Tensor = _SlicedSum.apply(function, tokens, logits, *constants)  # type: ignore[no-untyped-call]
    return total


@cache
def _compiled(function: _Loss) -> _Loss:
    return torch.compile(function)


class _SlicedSum(torch.autograd.Function):
    """Autograd through slices would keep the gradients of all of them, then join them in a copy."""

    @staticmethod
    def forward(ctx: Any, function: _Loss, tokens: int, logits: Tensor, *constants: Tensor) -> Tensor:
        ctx.function, ctx.tokens = function, tokens
        ctx.save_for_backward(logits, *constants)
        parts = (function(*slices) for slices in _slices(tokens, logits.detach(), *constants))
        return sum(parts, start=torch.zeros((), device=logits.device))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        logits, *constants = ctx.saved_tensors
        gradient = torch.empty_like(logits)
        for out, part, *others in _slices(ctx.tokens, gradient, logits.detach(), *constants):
            with torch.enable_grad():
                loss = ctx.function(part.requires_grad_(), *others)
            out.copy_(torch.autograd.grad(loss, part, grads[0])[0])
        return None, None, gradient, *(None for _ in constants)


def _slices(tokens: int, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    return zip(*(tensor.split(tokens) for tensor in tensors), strict=True)


def _nll(logits: Tensor, targets: Tensor, weights: Tensor | None = None) -> Tensor:
    if weights is None:
        return F.cross_entropy(logits.float(), targets, ignore_index=IGNORED, reduction="sum")
    each = F.cross_entropy(logits.float(), targets, ignore_index=IGNORED, reduction="none")
    return (each * weights).sum()


def _kl(logits: Tensor, dense: Tensor, targets: Tensor, weights: Tensor | None = None) -> Tensor:
    masked_log_p, dense_log_p = (x.float().log_softmax(-1) for x in (logits, dense))
    terms = F.kl_div(masked_log_p, dense_log_p, reduction="none", log_target=True)
    # A token that the dense model rules out (-inf) adds nothing, where the formula says 0 times infinity.
    each = terms.masked_fill(dense_log_p.isneginf(), 0.0).sum(-1).masked_fill(targets == IGNORED, 0.0)
    return (each if weights is None else each * weights).sum()
