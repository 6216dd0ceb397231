"""What the learner minimises: gradients against plain autograd on a tiny model."""

import pytest
import torch
from lightning.pytorch import Callback
from torch.nn import functional as F

from helpers.lab import make_lab
from helpers.tiny_models import VOCAB_SIZE, tiny_qwen2
from roi_lightning.learning import losses
from roi_lightning.learning.losses import kl_sum
from roi_lightning.samplers import GumbelTopK, StraightThrough

lab = pytest.fixture(make_lab)


class Expected(Callback):
    """Works out every optimizer step's gradients a second time, the plain way, before the step is taken."""

    def __init__(self, objective):
        self.objective, self.batches, self.compared = objective, [], 0

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.batches.append((batch["input_ids"], batch_idx))

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        logits = [layer.learned["logits"] for layer in pl_module.tensors.values()]
        wanted = [torch.zeros_like(x) for x in logits]
        for ids, batch_idx in self.batches:
            pl_module.prepare_step(batch_idx)
            drawn = {
                f"{name}.weight": pl_module.training_weight(tensor, **tensor.learned)
                for name, tensor in pl_module.tensors.items()
            }
            loss = self.objective(pl_module, drawn, ids) / len(self.batches)
            wanted = [a + b for a, b in zip(wanted, torch.autograd.grad(loss, logits), strict=True)]
        for layer, gradient in zip(pl_module.tensors.values(), wanted, strict=True):
            scale = float(gradient.abs().max())
            torch.testing.assert_close(layer.learned["logits"].grad, gradient, rtol=1e-4, atol=1e-4 * scale)
        self.batches = []
        self.compared += 1


def predicted(learner, drawn, ids):
    lm = torch.func.functional_call(learner.teacher, drawn, kwargs={"input_ids": ids})
    return lm.logits[:, :-1]


def cross_entropy(learner, drawn, ids):
    return F.cross_entropy(predicted(learner, drawn, ids).flatten(0, 1), ids[:, 1:].flatten())


@pytest.mark.parametrize(
    ("sampler", "parts", "dtype"),
    [
        *((GumbelTopK(), 1, torch.float32), (GumbelTopK(), 3, torch.float32)),
        (StraightThrough(), 1, torch.float64),
        pytest.param(StraightThrough(), 3, torch.float32, marks=pytest.mark.slow),
    ],
)
def test_kept_norm_has_the_gradient_of_the_squared_norm_and_fades(lab, sampler, parts, dtype):
    coefficient, steps, model = 0.5, 3, tiny_qwen2(lab.folder / "base", dtype=dtype)

    def objective(learner, drawn, ids):
        left = 1 - learner.trainer.global_step / steps
        norm = sum(weight.square().sum() for weight in drawn.values())
        return cross_entropy(learner, drawn, ids) - coefficient * left * norm

    expected = Expected(objective)
    trainer = {"accumulate_grad_batches": parts, "gradient_clip_val": None}
    lab.learn(steps, model, callbacks=[expected], trainer=trainer, sampler=sampler, kept_norm=coefficient)
    assert expected.compared == steps


def test_tokens_that_both_models_rule_out_leave_the_divergence_finite_and_right(monkeypatch):
    generator = torch.Generator().manual_seed(4)
    ours, theirs = (3 * torch.randn(3 * 64, VOCAB_SIZE, generator=generator) for _ in range(2))
    ids, known = torch.zeros(3, 64, dtype=torch.long), slice(0, VOCAB_SIZE - 40)
    out, theirs[:, -40:] = ours.double()[:, known].requires_grad_(), -torch.inf
    ours[:, -40:] = -torch.inf
    monkeypatch.setattr(losses, "_SLICE_BYTES", 4 * VOCAB_SIZE * 100)
    p, q = theirs[:, known].double().softmax(-1), out.softmax(-1)
    wanted = (p * (p.log() - q.log())).sum(-1).view(3, 64)[:, :-1].sum()
    found = kl_sum(ours.requires_grad_(), theirs, ids)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=0)
    found.backward()
    torch.testing.assert_close(
        ours.grad[:, known].double(), torch.autograd.grad(wanted, out)[0], rtol=0, atol=1e-5
    )
    assert not ours.grad[:, -40:].any()
