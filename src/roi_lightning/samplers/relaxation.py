"""Samplers with a relaxed mask: how tensors are filled and gradients made, by a kernel or in plain operations.

Kernels are C++ on CPUs and Triton on NVIDIA GPUs. One may decline: no compiler, an unknown dtype, too large a group.
Plain operations run everywhere. A gradient draws the same noise again, so that nothing is kept between the passes.
"""

from abc import abstractmethod
from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import Tensor
from typing_extensions import override

from roi_lightning.masks.pattern import NMPattern, top_members
from roi_lightning.samplers import cpu_kernels, triton_launch
from roi_lightning.samplers.base import Draw, Kernel, Sampler
from roi_lightning.samplers.soft_masks import NEVER

# Values worked on at a time: temporaries stay in the CPU's cache, and small beside the tensor.
_CPU_CHUNK: Final = 1 << 18
_CUDA_CHUNK: Final = 1 << 24
_ATTEMPTS: Final = {"cpu": cpu_kernels.attempt, "cuda": triton_launch.attempt}


class Relaxation(Sampler):
    """A sampler whose mask is a differentiable function of noisy keys, choice by choice κ φ + g.

    Attributes:
        compiled: Whether tensors may go through kernels; the same masks up to rounding.
    """

    compiled: bool

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "masked_weight" in vars(cls):  # one of its own, which kernels know nothing of
            for name in {"fill", "logits_gradient"} - vars(cls).keys():
                setattr(cls, name, getattr(Sampler, name))

    @abstractmethod
    def kernel(self, pattern: NMPattern) -> Kernel:
        """What computes the masks of a pattern."""

    @abstractmethod
    def soft_mask(self, keys: Tensor, pattern: NMPattern, tau: float) -> Tensor:
        """The relaxed mask [M, groups] of keys [choices, groups], differentiable; fp32 or fp64."""

    @override
    def masked_weight(self, weight: Tensor, logits: Tensor, pattern: NMPattern, draw: Draw) -> Tensor:
        drawn: Tensor = _Drawn.apply(logits.contiguous(), weight.contiguous(), self, pattern, draw)  # type: ignore[no-untyped-call]
        return drawn

    @override
    @torch.no_grad()
    def fill(self, out: Tensor, weight: Tensor, logits: Tensor, pattern: NMPattern, draw: Draw) -> None:
        if self._attempt("masked_weight", (logits, weight, out), pattern, draw):
            return
        hard = self.kernel(pattern).hard
        groups, filled = weight.view(-1, pattern.m), out.view(-1, pattern.m)
        for part, keys in self._keys(logits, pattern, draw):
            mask = top_members(keys, pattern.n) if hard else self.soft_mask(keys, pattern, draw.tau)
            # The product is taken in fp32 and rounded once to the weight's dtype; NaN shows under a hard mask, too.
            filled[part].T.copy_(mask * groups[part].T.float() + (keys[0] - keys[0]))

    @override
    @torch.no_grad()
    def logits_gradient(
        self, gradient: Tensor, weight: Tensor, logits: Tensor, pattern: NMPattern, draw: Draw
    ) -> Tensor:
        gradient, out = gradient.to(weight.dtype).contiguous(), torch.empty_like(logits)
        if self._attempt("logits_gradient", (logits, weight, gradient, out), pattern, draw):
            return out
        groups, of_groups = weight.view(-1, pattern.m), gradient.view(-1, pattern.m)
        filled = self._by_group(out, pattern)
        for part, keys in self._keys(logits, pattern, draw):
            of_mask = (of_groups[part].T.float() * groups[part].T.float()).contiguous()
            with torch.enable_grad():
                mask = self.soft_mask(keys.requires_grad_(), pattern, draw.tau)
            (of_keys,) = torch.autograd.grad(mask, keys, of_mask)
            filled[part].T.copy_(of_keys.div_(draw.lam).add_(keys[0] - keys[0]))
        return out

    def _attempt(self, name: str, tensors: tuple[Tensor, ...], pattern: NMPattern, draw: Draw) -> bool:
        attempt = _ATTEMPTS.get(tensors[0].device.type)
        return self.compiled and attempt is not None and attempt(self.kernel(pattern), name, tensors, draw)

    def _keys(self, logits: Tensor, pattern: NMPattern, draw: Draw) -> Iterator[tuple[slice, Tensor]]:
        """The keys [choices, groups] of some groups after the other, and which groups these are."""
        rows = self._by_group(logits, pattern)
        # torch sums the last few values of a row in another order; whole blocks of 32 keep every bit.
        step = max(1, chunk_size(logits) // self.kernel(pattern).size // 32) * 32
        for start in range(0, len(rows), step):
            groups = range(start, min(start + step, len(rows)))
            noise = draw.noise(groups, rows.shape[1], logits.device)
            part = slice(groups.start, groups.stop)
            keys = noise.add_(rows[part] / draw.lam).T.contiguous()
            # Where a logit is NaN or +inf, or fewer than are taken are not -inf, all of the group must show it.
            good = ((keys > NEVER).sum(0) >= self.picks(pattern)) & (keys.amax(0) < torch.inf)
            yield part, keys.clamp_(min=NEVER).masked_fill_(~good, torch.nan)

    def _by_group(self, logits: Tensor, pattern: NMPattern) -> Tensor:
        """Contiguous logits as a view [groups, choices]."""
        choices = self.choices(logits, pattern)
        return choices.view(-1, choices.shape[-1])


def chunk_size(tensor: Tensor) -> int:
    """How many values to work on at a time where this tensor is."""
    return _CUDA_CHUNK if tensor.is_cuda else _CPU_CHUNK


class _Drawn(torch.autograd.Function):
    """A masked weight that keeps nothing but what it was made of."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, weight: Tensor, sampler: Relaxation, pattern: NMPattern, draw: Draw
    ) -> Tensor:
        ctx.save_for_backward(weight, logits)
        ctx.sampler, ctx.draw = sampler, (pattern, draw)
        out = torch.empty_like(weight)
        Relaxation.fill(sampler, out, weight, logits, pattern, draw)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        gradient = Relaxation.logits_gradient(ctx.sampler, grads[0], *ctx.saved_tensors, *ctx.draw)
        return gradient, None, None, None, None
