"""The comparison of `gradient_variance.py` for a loss linear in the mask: no model, hundreds of draws, seconds.

python -m benchmarks.gradient_variance_linear
"""

from typing import Final

import torch
from torch import Tensor

from benchmarks.gradient_variance import (
    PULLED_BACK,
    SETTINGS,
    Setting,
    inner_products,
    relative_variance,
    samplers,
    to_candidates,
    to_weights,
    with_error,
)
from roi_lightning.masks.pattern import NMPattern
from roi_lightning.samplers import Categorical, Draw, GumbelSubset, Sampler
from roi_lightning.utils.tables import markdown_table

SHAPE: Final = (64, 1024)
DRAWS: Final = 200
WARM: Final = Setting("small budget, start, τ = 1", 0.005, 1.0)


def gradients(pattern: NMPattern, setting: Setting, sampler: Sampler) -> tuple[list[Tensor], Tensor]:
    """The gradient of Σ u m, u ~ N(0, 1), in each of `DRAWS` draws, and the likeliest mask."""
    generator = torch.Generator().manual_seed(0)
    prior = (torch.arange(SHAPE[1]) % pattern.m < pattern.n).expand(SHAPE)
    phi = torch.randn(SHAPE, generator=generator) * setting.std
    phi += torch.where(prior, setting.strength, -setting.strength)
    slopes, ones = torch.randn(SHAPE, generator=generator), torch.ones(SHAPE)
    logits = to_candidates(phi, pattern) if isinstance(sampler, Categorical) else phi
    logits.requires_grad_()
    found: list[Tensor] = []
    for index in range(DRAWS):
        drawn = sampler.masked_weight(
            ones, logits, pattern, Draw(0, index, setting.lam, setting.tau), "layer"
        )
        found += torch.autograd.grad(drawn, logits, slopes)
    return found, pattern.top(phi.detach())


def among_kept(found: list[Tensor], likeliest: Tensor, pattern: NMPattern) -> float:
    """The share of E‖g‖² that only moves the logits of weights of the likeliest mask against each other."""
    part = whole = 0.0
    for gradient in found:
        kept = pattern.group(gradient.masked_fill(~likeliest, 0.0))
        among = (kept - kept.sum(-1, keepdim=True) / pattern.n) * pattern.group(likeliest)
        part, whole = part + float(among.square().sum()), whole + float(gradient.square().sum())
    return part / whole


def main() -> None:
    """Print the table."""
    rows = []
    for pattern in map(NMPattern, ("2:4", "2:8")):
        for setting in (*SETTINGS, WARM):
            for name, sampler in (samplers(pattern) | {"RoI, whole masks": GumbelSubset()}).items():
                found, likeliest = gradients(pattern, setting, sampler)
                spaces = {name: found}
                if isinstance(sampler, Categorical):
                    spaces[PULLED_BACK] = [to_weights(x, pattern) for x in found]
                for label, own in spaces.items():
                    products = inner_products([[x] for x in own]).unsqueeze(0)
                    figure, error = with_error(relative_variance, products)
                    in_weights = own[0].shape == likeliest.shape
                    share = f"{among_kept(own, likeliest, pattern):.0%}" if in_weights else ""
                    place = [str(pattern), setting.name, f"{setting.lam:g}", f"{setting.tau:g}", label]
                    rows.append([*place, f"{figure:,.2f} ± {error:,.2f}", share])
    head = ["pattern", "setting", "λ", "τ", "gradient of", "relative variance", "of it among the kept"]
    print(markdown_table(head, rows, left=5))


if __name__ == "__main__":
    main()
