"""How well a model predicts text: perplexity over fixed windows of tokens."""

import math

import torch
from torch import Tensor
from torchmetrics import MeanMetric
from transformers.modeling_utils import PreTrainedModel

from roi_lightning.loss import next_token_nll


@torch.no_grad()
def window_perplexity(lm: PreTrainedModel, windows: Tensor, batch_size: int = 1) -> float:
    """Token perplexity: exp of the mean negative log-likelihood over all predicted tokens.

    Args:
        lm: The model, in whatever mode its layers are.
        windows: [count, seq_len] token ids; the first token of each window is context only.
        batch_size: Windows per forward pass.

    Returns:
        The perplexity; infinite where the mean exceeds what exp can hold.
    """
    mean = MeanMetric()
    device = next(lm.parameters()).device
    for batch in windows.split(batch_size):
        nll, count = next_token_nll(lm, batch.to(device))
        mean.update(nll.cpu() / count, weight=count)
    value = float(mean.compute())
    return math.exp(value) if value < 700 else math.inf
