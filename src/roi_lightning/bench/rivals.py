"""The samplers as one would first write them: autograd keeps what it needs, nothing is fused."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F
from typing_extensions import override

from roi_lightning.pattern import NMPattern
from roi_lightning.samplers import Categorical, Draw, GumbelTopK
from roi_lightning.samplers.candidates import members_of
from roi_lightning.samplers.kept_norm import KeptNorm
from roi_lightning.samplers.reference import relaxed_top_n


@dataclass(frozen=True)
class PlainRoI(GumbelTopK):
    """The relaxed Gumbel-Top-K written down as in the paper, left to autograd."""

    @override
    def masked_weight(
        self,
        weight: Tensor,
        logits: Tensor,
        pattern: NMPattern,
        dim: int,
        draw: Draw,
        layer: str,
        kept_norm: KeptNorm | None = None,
    ) -> Tensor:
        grouped = pattern.group(logits, dim)
        noise = -torch.log(-torch.log(torch.rand_like(grouped).clamp_(1e-7, 1 - 1e-7)))
        mask = relaxed_top_n(grouped, noise, pattern.n, draw.lam, draw.tau, self.push_down)
        return weight * mask.flatten(-2).movedim(-1, dim).to(weight.dtype)


@dataclass(frozen=True)
class PlainMaskLLM(Categorical):
    """MaskLLM as its authors wrote it: noise, shares and mask are tensors, the mask a product with the candidates."""

    @override
    def masked_weight(
        self,
        weight: Tensor,
        logits: Tensor,
        pattern: NMPattern,
        dim: int,
        draw: Draw,
        layer: str,
        kept_norm: KeptNorm | None = None,
    ) -> Tensor:
        shares = F.gumbel_softmax(logits.movedim(0, -1) / draw.lam, tau=draw.tau)
        members = members_of(pattern, logits.device)
        candidates = torch.zeros(len(members), pattern.m, device=logits.device).scatter_(1, members, 1.0)
        mask = (shares @ candidates).movedim(-1, dim + 1).flatten(dim, dim + 1)
        return weight * mask.to(weight.dtype)
