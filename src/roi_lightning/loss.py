"""What training minimises, in fp32, a slice of tokens at a time.

The logits of a model come in its own dtype; turned to fp32 whole they would be the largest tensor of a step
(a vocabulary of 152 k times 4,096 tokens is 2.5 GB), so each slice is turned, used and dropped, in the
backward pass too.
"""

from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.modeling_utils import PreTrainedModel

# In fp32. A processor's allocator hands larger pieces back to the system, and waits for new ones the next time; a GPU
# has more to do with them than launching takes.
_SLICE_BYTES: Final = 24 << 20
_GPU_SLICE_BYTES: Final = 96 << 20
_NOTHING: Final = -100

# The fp32 sum over some tokens, of their logits and what else there is to know of them.
_Loss = Callable[..., Tensor]


def next_token_nll(lm: PreTrainedModel, input_ids: Tensor) -> tuple[Tensor, int]:
    """Sum of the negative log-likelihood of every token but the first of each window.

    Args:
        lm: Any causal language model.
        input_ids: [batch, seq_len] token ids, seq_len of at least 2.

    Returns:
        The fp32 sum in nats, differentiable, and the number of predicted tokens.
    """
    return nll_sum(next_token_logits(lm, input_ids), input_ids), input_ids[:, 1:].numel()


def next_token_logits(lm: PreTrainedModel, input_ids: Tensor) -> Tensor:
    """[batch * seq_len, vocabulary] in the model's dtype; those of a window's last token predict nothing.

    Args:
        lm: Any causal language model.
        input_ids: [batch, seq_len] token ids.
    """
    logits: Tensor = lm(input_ids=input_ids, use_cache=False).logits
    return logits.flatten(0, 1)


def nll_sum(logits: Tensor, input_ids: Tensor) -> Tensor:
    """Negative log-likelihood of the text, summed over predicted tokens.

    Args:
        logits: As `next_token_logits` gives them.
        input_ids: [batch, seq_len] token ids.

    Returns:
        fp32 scalar in nats.
    """
    return _sum_slices(_nll, logits, _targets(input_ids))


def kl_sum(logits: Tensor, dense: Tensor, input_ids: Tensor) -> Tensor:
    """KL(dense ‖ masked) of the next-token distributions, summed over predicted tokens.

    Args:
        logits: Of the masked model, differentiable, as `next_token_logits` gives them.
        dense: Of the dense model, the same shape; a constant.
        input_ids: [batch, seq_len] token ids; they only say which positions count.

    Returns:
        fp32 scalar in nats.
    """
    return _sum_slices(_kl, logits, dense, _targets(input_ids))


def _targets(input_ids: Tensor) -> Tensor:
    # The last token of a window predicts nothing; cutting it off instead would copy the logits.
    return F.pad(input_ids[:, 1:], (0, 1), value=_NOTHING).flatten()


def _sum_slices(function: _Loss, logits: Tensor, *constants: Tensor) -> Tensor:
    total = _SlicedSum.apply(function, logits, *constants)  # type: ignore[no-untyped-call]
    assert isinstance(total, Tensor)
    return total


class _SlicedSum(torch.autograd.Function):
    """Autograd through slices would keep the gradients of all of them, then join them in a copy."""

    @staticmethod
    def forward(ctx: Any, function: _Loss, logits: Tensor, *constants: Tensor) -> Tensor:
        ctx.function = function
        ctx.save_for_backward(logits, *constants)
        parts = (function(*slices) for slices in _slices(logits, *constants))
        return sum(parts, start=torch.zeros((), device=logits.device))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        logits, *constants = ctx.saved_tensors
        gradient = torch.empty_like(logits)
        for out, part, *others in _slices(gradient, logits.detach(), *constants):
            with torch.enable_grad():
                loss = ctx.function(part.requires_grad_(), *others)
            out.copy_(torch.autograd.grad(loss, part, grads[0])[0])
        return None, gradient, *(None for _ in constants)


def _slices(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    tokens = _slice_tokens(tensors[0])
    return zip(*(tensor.split(tokens) for tensor in tensors), strict=True)


def _slice_tokens(logits: Tensor) -> int:
    size = _SLICE_BYTES if logits.device.type == "cpu" else _GPU_SLICE_BYTES
    return max(1, size // (logits.shape[1] * torch.float32.itemsize))


def _nll(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), targets, ignore_index=_NOTHING, reduction="sum")


def _kl(logits: Tensor, dense: Tensor, targets: Tensor) -> Tensor:
    ours, theirs = (x.float().log_softmax(-1) for x in (logits, dense))
    # A token that the dense model rules out (-inf) adds nothing, where the formula says 0 times infinity.
    terms = F.kl_div(ours, theirs, reduction="none", log_target=True).masked_fill(theirs.isneginf(), 0.0)
    each = terms.sum(-1)
    return each.masked_fill(targets == _NOTHING, 0.0).sum()
