"""What whole runs compute with other kernels, threads, precisions, optimizers and attention."""

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.plugins import MixedPrecision

from helpers.lab import make_lab
from helpers.tiny_models import tiny_llama
from roi_lightning.samplers import Categorical, GumbelTopK, StraightThrough, cpu_kernels

lab = pytest.fixture(make_lab)
STEPS = 4


class Losses(Callback):
    def __init__(self):
        self.values = []

    def on_train_batch_end(self, trainer, pl_module, outputs, *args):
        self.values.append(float(outputs["loss"]))


def distance(one, other):
    """Of two runs' logits, relative to the length of the second."""
    apart = sum(float((value - other[name]).square().sum()) for name, value in one.items())
    return (apart / sum(float(value.square().sum()) for value in other.values())) ** 0.5


# The samplers' C++ kernels.


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """A model with layers just large enough for the kernels."""
    return tiny_llama(tmp_path_factory.mktemp("wide") / "m", intermediate_size=1024, num_hidden_layers=1)


@pytest.fixture
def calls(monkeypatch):
    """How often the C++ kernels ran."""
    found, run = [], cpu_kernels.run

    def counting(*args):
        found.append(1)
        run(*args)

    monkeypatch.setattr(cpu_kernels, "run", counting)
    return found


def learn(lab, model, trainer=None, **options):
    """Four steps; the logits and the losses of all micro-batches."""
    losses = Losses()
    learner, _ = lab.learn(STEPS, model, callbacks=[losses], trainer=trainer, **options)
    return {name: x.whole("logits") for name, x in learner.tensors.items()}, losses.values


@pytest.mark.parametrize("kind", [GumbelTopK, StraightThrough, Categorical])
def test_a_run_with_the_kernels_is_the_eager_one_but_for_rounding(kind, lab, wide, calls):
    slow, slow_losses = learn(lab, wide, sampler=kind(compiled=False))
    assert not calls
    fast, fast_losses = learn(lab, wide, sampler=kind())
    assert len(calls) == 3 * 2 * STEPS
    assert fast_losses == pytest.approx(slow_losses, rel=1e-5)
    # The first steps of AdamW turn the rounding of a gradient near zero into a step of some length.
    apart = torch.cat([((value - slow[name]).abs() > 1e-5).flatten() for name, value in fast.items()])
    assert apart.float().mean() < 1e-3


# Precisions, optimizers, attention.


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return tiny_llama(tmp_path_factory.mktemp("llama") / "model")


@pytest.mark.parametrize(("precision", "digits"), [("bf16-mixed", 8), ("16-mixed", 11)])
def test_mixed_precision_learns_the_same_but_for_its_rounding(precision, digits, lab, llama):
    everything = {"kept_norm": 0.1, "distillation": 0.5}
    trainer = {"accumulate_grad_batches": 2, "gradient_clip_val": 1.0}
    exact, exact_losses = learn(lab, llama, trainer, **everything)
    # The precision itself: Lightning replaces 16-mixed by bf16 on a CPU.
    plugins = [MixedPrecision(precision, "cpu")]
    mixed, losses = learn(lab, llama, trainer | {"plugins": plugins}, **everything)
    assert losses == pytest.approx(exact_losses, rel=2.0**-digits)
    assert losses != exact_losses
    assert {value.dtype for value in mixed.values()} == {torch.float32}
    assert distance(mixed, exact) < 0.05  # without the reward it would be 1.2
