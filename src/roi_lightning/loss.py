"""Next-token cross-entropy in fp32, a slice of tokens at a time.

The logits of a model come in its own dtype; turned to fp32 whole they would be the largest tensor of a step
(a vocabulary of 152 k times 4,096 tokens is 2.5 GB), so each slice is turned, used and dropped, in the
backward pass too.
"""

from typing import Final

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers.modeling_utils import PreTrainedModel

_SLICE_TOKENS: Final = 512
_NOTHING: Final = -100


def next_token_nll(lm: PreTrainedModel, input_ids: Tensor) -> tuple[Tensor, int]:
    """Sum of the negative log-likelihood of every token but the first of each window.

    Args:
        lm: Any causal language model.
        input_ids: [batch, seq_len] token ids, seq_len of at least 2.

    Returns:
        The fp32 sum in nats, differentiable, and the number of predicted tokens.
    """
    logits = lm(input_ids=input_ids, use_cache=False).logits.flatten(0, 1)
    # The last token of a window predicts nothing; cutting it off instead would copy the logits.
    targets = F.pad(input_ids[:, 1:], (0, 1), value=_NOTHING).flatten()
    total = torch.zeros((), dtype=torch.float32, device=input_ids.device)
    for part, wanted in zip(logits.split(_SLICE_TOKENS), targets.split(_SLICE_TOKENS), strict=True):
        if torch.is_grad_enabled():
            nll = checkpoint(_nll, part, wanted, use_reentrant=False, preserve_rng_state=False)
            assert isinstance(nll, Tensor)
        else:
            nll = _nll(part, wanted)
        total = total + nll
    return total, input_ids[:, 1:].numel()


def _nll(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), targets, ignore_index=_NOTHING, reduction="sum")
