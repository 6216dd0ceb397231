"""What must hold on a CUDA device as well; skipped without one."""

import pytest
import torch

from roi_lightning.noise import gumbel, noise_key
from roi_lightning.pattern import NMPattern
from roi_lightning.samplers import Draw, GumbelTopK, StraightThrough

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_noise_is_the_same_on_every_device():
    index = torch.arange(1 << 20, dtype=torch.int32)
    key = noise_key(1, 2, "layer")
    assert torch.allclose(gumbel(index, key), gumbel(index.cuda(), key).cpu(), atol=1e-5)


@pytest.mark.parametrize("sampler", [GumbelTopK(), StraightThrough()])
@pytest.mark.parametrize(("pattern", "dim"), [("2:4", 1), ("2:8", 1), ("4:8", 0)])
def test_masked_weight_agrees_with_the_cpu(sampler, pattern, dim):
    torch.manual_seed(0)
    weight, logits = torch.randn(256, 512), torch.randn(256, 512) * 0.01
    results = []
    for device in ("cpu", "cuda"):
        parameter = logits.to(device).requires_grad_()
        out = sampler.masked_weight(
            weight.to(device), parameter, NMPattern(pattern), dim, Draw(0, 3, 0.01, 0.3), "layer"
        )
        out.square().sum().backward()
        results.append((out.detach().cpu(), parameter.grad.cpu()))
    for one, other in zip(*results, strict=True):
        assert torch.allclose(one, other, rtol=1e-3, atol=1e-3 * float(one.abs().max()))


def test_hard_masks_are_the_same_on_every_device():
    scores = torch.randint(0, 4, (64, 256)).float()
    pattern = NMPattern("2:4")
    assert torch.equal(pattern.top(scores), pattern.top(scores.cuda()).cpu())
