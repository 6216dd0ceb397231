"""The samplers as one would first write them: autograd keeps what it needs, nothing is fused."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F
from typing_extensions import override

from roi_lightning.masks.pattern import NMPattern
from roi_lightning.samplers import Categorical, Draw, GumbelTopK, Sampler
from roi_lightning.samplers.reference import relaxed_top_n
from roi_lightning.samplers.soft_masks import candidates


class KeepsGraph(Sampler):
    """A sampler whose draws keep what autograd wants for their backward pass."""

    _graphs: ClassVar[dict[int, tuple[Tensor, Tensor]]] = {}

    @override
    def fill(self, out: Tensor, weight: Tensor, logits: Tensor, pattern: NMPattern, draw: Draw) -> None:
        own = logits.detach().requires_grad_()
        with torch.enable_grad():
            drawn = self.masked_weight(weight, own, pattern, draw)
        out.copy_(drawn.detach())
        self._graphs[logits.data_ptr()] = drawn, own

    @override
    def logits_gradient(
        self, gradient: Tensor, weight: Tensor, logits: Tensor, pattern: NMPattern, draw: Draw
    ) -> Tensor:
        drawn, own = self._graphs.pop(logits.data_ptr())
        return torch.autograd.grad(drawn, own, gradient)[0]


@dataclass(frozen=True)
class PlainRoI(KeepsGraph, GumbelTopK):
    """The relaxed Gumbel-Top-K written down as in the paper, left to autograd."""

    fill, logits_gradient = KeepsGraph.fill, KeepsGraph.logits_gradient

    @override
    def masked_weight(self, weight: Tensor, logits: Tensor, pattern: NMPattern, draw: Draw) -> Tensor:
        grouped = pattern.group(logits)
        noise = -torch.log(-torch.log(torch.rand_like(grouped).clamp_(1e-7, 1 - 1e-7)))
        mask = relaxed_top_n(grouped, noise, pattern.n, draw.lam, draw.tau, self.push_down)
        return weight * mask.flatten(-2).to(weight.dtype)


@dataclass(frozen=True)
class PlainMaskLLM(KeepsGraph, Categorical):
    """MaskLLM as its authors wrote it: noise, probabilities and mask are tensors, nothing is fused."""

    fill, logits_gradient = KeepsGraph.fill, KeepsGraph.logits_gradient

    @override
    def masked_weight(self, weight: Tensor, logits: Tensor, pattern: NMPattern, draw: Draw) -> Tensor:
        shares = F.gumbel_softmax(logits.movedim(0, -1) / draw.lam, tau=draw.tau)
        kept = candidates(pattern.n, pattern.m, logits.device)
        masks = torch.zeros(len(kept), pattern.m, device=logits.device).scatter_(1, kept, 1.0)
        return weight * (shares @ masks).flatten(-2).to(weight.dtype)
