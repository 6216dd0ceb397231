"""The network of HyperPrune: from the weights of a group to a logit for each of its candidate masks.

Legend: G = groups, M = weights of a group, C = C(M, N) candidate masks, d = numbers of an embedding.
"""

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from roi_lightning.masks.pattern import NMPattern
from roi_lightning.samplers import Categorical

# Hidden values worked on at a time, which the backward pass computes again: 16 MB on a CPU, 256 MB on a GPU.
_CPU_CHUNK: Final = 1 << 22
_CUDA_CHUNK: Final = 1 << 26
# What stands for an earlier layer, and how many of these a step looks at.
_KEPT_GROUPS: Final = 512
_REPLAYED_LAYERS: Final = 8


@dataclass(frozen=True)
class _EarlierLayer:
    """A sample of the groups of an earlier layer, and the teacher's logits for them."""

    block: int
    kind: str
    groups: Tensor
    logits: Tensor


class MaskNetwork:
    """Four linear layers, an embedding of every block and one of every kind of layer.

    A new block's embedding starts as the one of the block before it. The last layer starts at zero: untrained, the
    network prefers no candidate.

    Args:
        pattern: N:M of all layers it serves.
        hidden: Width of the three hidden layers.
        embedding: Numbers d of an embedding.
        seed: Of the initial weights, and of all choices.
        device: Where it is.
    """

    def __init__(
        self, pattern: NMPattern, hidden: int, embedding: int, seed: int, device: torch.device
    ) -> None:
        self._embedding, self._device = embedding, device
        self._generator = torch.Generator().manual_seed(seed)
        self._blocks: dict[int, nn.Parameter] = {}
        self._kinds: dict[str, nn.Parameter] = {}
        self._earlier: list[_EarlierLayer] = []
        candidates = Categorical().logits_shape((1, pattern.m), pattern)[0]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            sizes = (pattern.m + 2 * embedding, hidden, hidden, hidden, candidates)
            layers = [nn.Linear(size, after) for size, after in pairwise(sizes)]
            for layer in layers:
                nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
                nn.init.zeros_(layer.bias)
        nn.init.zeros_(layers[-1].weight)
        self._layers = nn.ModuleList(layers).to(device)

    def begin(self, block: int, kinds: set[str]) -> list[nn.Parameter]:
        """Be the teacher of a block: remember the logits of earlier layers as they are now.

        Args:
            block: Its index.
            kinds: Of its layers.

        Returns:
            What is learned from this block: the network, its embedding, and those of its kinds.
        """
        with torch.no_grad():
            self._earlier = [
                replace(one, logits=self.logits(one.groups, one.block, one.kind)) for one in self._earlier
            ]
        last = next(reversed(self._blocks.values()), torch.zeros(self._embedding))
        self._blocks[block] = self._parameter(last.detach().clone())
        for kind in sorted(kinds - self._kinds.keys()):
            # Of length 1: groups, whose numbers are about 1, are to decide more.
            start = torch.randn(self._embedding, generator=self._generator) / self._embedding**0.5
            self._kinds[kind] = self._parameter(start)
        return [*self._layers.parameters(), self._blocks[block], *(self._kinds[x] for x in sorted(kinds))]

    def logits(self, groups: Tensor, block: int, kind: str) -> Tensor:
        """Every group's logits, fp32 [C, G]; no more than a chunk's hidden values are in memory at once.

        Args:
            groups: What stands for the weights of each group, fp32 [G, M].
            block: The index of their block.
            kind: Of their layer.
        """
        first = self._layers[0]
        assert isinstance(first, nn.Linear)
        size = groups.shape[1]
        # The embeddings are the same in all groups.
        bias = first.bias + first.weight[:, size:] @ torch.cat([self._blocks[block], self._kinds[kind]])
        step = max(1, (_CUDA_CHUNK if groups.is_cuda else _CPU_CHUNK) // first.out_features)
        parts = [
            checkpoint(self._forward, part, first.weight[:, :size], bias, use_reentrant=False)
            for part in groups.split(step)
        ]
        return torch.cat(parts, dim=1)

    def remember(self, groups: Tensor, block: int, kind: str) -> None:
        """Keep a sample of a layer's groups, fp32 [G, M], for `drift`."""
        chosen = torch.randint(len(groups), (_KEPT_GROUPS,), generator=self._generator)
        kept = groups[chosen.to(groups.device)]
        self._earlier.append(_EarlierLayer(block, kind, kept, kept))

    def drift(self) -> Tensor:
        """R_continual, estimated on the sampled groups of some earlier layers; fp32 scalar, 0 before there are any.

        Mean square of how far a candidate's logit has moved since the last `begin`.
        """
        if not self._earlier:
            return torch.zeros((), device=self._device, requires_grad=True)
        order = torch.randperm(len(self._earlier), generator=self._generator)[:_REPLAYED_LAYERS]
        chosen = [self._earlier[i] for i in order.tolist()]
        moved = [F.mse_loss(self.logits(x.groups, x.block, x.kind), x.logits) for x in chosen]
        return torch.stack(moved).mean()

    def _forward(self, groups: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        x = F.linear(groups, weight, bias)
        for layer in self._layers[1:]:
            x = layer(F.relu(x))
        return x.T

    def _parameter(self, value: Tensor) -> nn.Parameter:
        return nn.Parameter(value.to(self._device))
