"""Attention on processors that have no instructions for its numbers: in fp32, and once more for gradients."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from roi_lightning.products import is_widened

# What transformers may give its function beyond what `_attend` widens.
_OTHERS: Final = ("position_bias", "cache")


def widen_attention() -> None:
    """Have the `sdpa` attention of transformers' models take place in fp32 where `products.linear` would.

    It serves models under their own name for it, because some of them compare that name to choose their masks. On
    other devices, for other numbers and on processors that have the instructions nothing changes.
    """
    AttentionInterface.register("sdpa", _attend)


@contextmanager
def attention_put_back() -> Iterator[None]:
    """Leave transformers' `sdpa` attention, when the block ends, as it was before."""
    before = AttentionInterface()["sdpa"]
    try:
        yield
    finally:
        AttentionInterface.register("sdpa", before)


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    if not is_widened(query) or any(options.get(name) is not None for name in _OTHERS):
        plain: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, **options
        )
        return plain

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        wide = query.float(), key.float(), value.float(), _wide_mask(attention_mask)
        with torch.autocast("cpu", enabled=False):
            out: Tensor = sdpa_attention_forward(module, *wide, **options)[0]
        return out.to(query.dtype)

    # Nothing wide is kept: a step holds what it holds on other processors.
    out: Tensor = checkpoint(attend, query, key, value, use_reentrant=False)
    return out, None


def _wide_mask(mask: Tensor | None) -> Tensor | None:
    return mask.float() if mask is not None and mask.is_floating_point() else mask
