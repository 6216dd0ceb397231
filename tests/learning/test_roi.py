"""The learner: what it trains, when it anneals, what it measures, what it writes."""

import logging
import math
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import Callback
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from helpers.lab import QUICK_TRAINER, brute_top, make_lab
from roi_lightning.errors import UserError
from roi_lightning.evaluation.perplexity import token_perplexity
from roi_lightning.learning.roi import RoILightningModule
from roi_lightning.learning.trainer import RoITrainer
from roi_lightning.masks.layer_mask import LayerMask
from roi_lightning.samplers import GumbelSubset, GumbelTopK
from roi_lightning.samplers.schedules import Exponential, Linear

lab = pytest.fixture(make_lab)


class Recorder(Callback):
    """What each micro-batch drew and each step's learning rate."""

    def __init__(self):
        self.draws, self.rates = [], []

    def on_train_batch_end(self, trainer, pl_module, *args):
        self.draws.append(next(iter(pl_module.draws.values())))

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.rates.append(optimizer.param_groups[0]["lr"])
        assert all(module.training for lm in pl_module.models() for module in lm.modules())
        for name, parameter in pl_module.named_parameters():
            assert (parameter.grad is None) == (not name.startswith("learned.")), name


@pytest.mark.parametrize(
    ("sampler", "tau", "told"),
    [
        (GumbelTopK(), 2.0, True),
        (GumbelTopK(), 1.0, False),
        (GumbelSubset(), 2.0, False),
    ],
)
def test_a_run_too_soft_for_its_recursion_says_so(lab, caplog, sampler, tau, told):
    with caplog.at_level(logging.INFO):
        lab.learn(1, sampler=sampler, tau=Linear(tau, 0.05))
    assert (
        f"model.tau above 1, here {tau:g}, the paper's recursion picks a weight twice" in caplog.text
    ) == told


def test_only_the_logits_learn(lab):
    recorder = Recorder()
    learner, trainer = lab.learn(3, callbacks=[recorder], dtype="bfloat16")
    plain = AutoModelForCausalLM.from_pretrained(lab.model)
    before, after = plain.state_dict(), learner.teacher.state_dict()
    assert before.keys() == after.keys() == learner.student.state_dict().keys()
    for name, tensor in before.items():
        assert torch.equal(after[name], tensor), name
        assert after[name].dtype == tensor.dtype
    trained = [p for group in trainer.optimizers[0].param_groups for p in group["params"]]
    assert {id(p) for p in trained} == {id(layer.learned["logits"]) for layer in learner.tensors.values()}
    assert {p.dtype for p in trained} == {torch.float32}
    assert len(recorder.rates) == 3


def test_rate_and_temperatures_follow_optimizer_steps(lab):
    recorder, steps, parts = Recorder(), 8, 3
    _, trainer = lab.learn(
        steps,
        lr=0.02,
        lr_end=0.002,
        callbacks=[recorder],
        trainer={"accumulate_grad_batches": parts},
        tau=Exponential(1.0, 0.05, 0.75),
        lam=Linear(0.5, 0.1, 0.5),
    )
    assert len(recorder.draws) == steps * parts
    for i, draw in enumerate(recorder.draws):
        step = i // parts
        assert draw.tau == pytest.approx(0.05 ** min(1, step / 6))
        assert draw.lam == pytest.approx(0.5 - 0.4 * min(1, step / 4))
    wanted = [0.002 + 0.009 * (1 + math.cos(math.pi * step / steps)) for step in range(steps)]
    assert recorder.rates == pytest.approx(wanted)
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.002)
    assert len({draw.key for draw in recorder.draws}) == steps * parts


def test_a_draw_is_a_step_s_or_one_micro_batch_s_alone(lab):
    for draw_per in ("step", "micro_batch"):
        learner, seen = RoILightningModule(str(lab.model), draw_per=draw_per), {}
        # A run of 8 windows a step that goes on in other micro-batches, on other ranks, and back again.
        for step, (world, parts) in enumerate([(1, 8), (2, 4), (4, 2), (1, 1), (1, 8), (2, 2)]):
            for rank, part in product(range(world), range(parts)):
                learner._trainer = SimpleNamespace(
                    accumulate_grad_batches=parts, world_size=world, global_rank=rank
                )
                index = learner._draw_index(step, step * parts + part)
                seen.setdefault(index, []).append((step, part * world + rank))
        if draw_per == "step":
            assert [{step for step, _ in places} for places in seen.values()] == [{i} for i in range(6)]
        assert (max(map(len, seen.values())) == 1) == (draw_per == "micro_batch")


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
def test_validation_measures_the_hardened_mask(lab):
    learner, data = RoILightningModule(str(lab.model), dtype="float32"), lab.data(val_windows=5)
    learner.configure_model()
    generator = torch.Generator().manual_seed(3)
    for layer in learner.tensors.values():
        layer.learned["logits"].data = torch.randn(layer.learned["logits"].shape, generator=generator)
    trainer = RoITrainer(**QUICK_TRAINER | {"limit_val_batches": 1.0}, max_steps=1)
    metrics = trainer.validate(learner, datamodule=data, verbose=False)[0]
    plain = AutoModelForCausalLM.from_pretrained(lab.model, dtype=torch.float32)
    for name, layer in learner.tensors.items():
        weight = plain.get_parameter(f"{name}.weight").data
        weight[~brute_top(layer.learned["logits"].detach(), 2, 4)] = 0
        assert name.split(".")[-1][0] not in "qkv" or plain.get_submodule(name).bias is not None
    ids = data.windows("val", data.val_tokens // 32)
    with torch.no_grad():
        logits = plain(input_ids=ids).logits[:, :-1]
    nll = float(F.cross_entropy(logits.reshape(-1, logits.shape[-1]), ids[:, 1:].reshape(-1)))
    assert metrics["val/nll"] == pytest.approx(nll, rel=1e-5)
    assert metrics["val/perplexity"] == pytest.approx(math.exp(nll), rel=1e-4)


def test_a_learned_mask_beats_magnitude_on_held_out_text(lab):
    learner, trainer = lab.learn(40, lr=0.05, lr_end=0.01, trainer={"accumulate_grad_batches": 1})
    windows = trainer.datamodule.windows("val", 4)
    learned = token_perplexity(learner.harden(), [windows])
    largest = {
        name: LayerMask.from_rows(learner.pattern.top(tensor.dense.abs()))
        for name, tensor in learner.tensors.items()
    }
    magnitude = token_perplexity(learner.harden(largest), [windows])
    assert learned < 0.7 * magnitude


REFUSED = {
    "bf16-true": ({"trainer": {"precision": "bf16-true"}}, "would round the logits.*32-true.*model.dtype"),
    "16-true": ({"trainer": {"precision": "16-true"}}, "would round the logits"),
    "no max_steps": ({"max_steps": -1}, r"trainer.max_steps is -1; set it"),
    "a sampler": ({"sampler": "Straight"}, "'Straight' can't be made: .*did you mean StraightThrough"),
    "a schedule": ({"tau": {"class_path": "Linear", "init_args": {"stop": 1}}}, "'stop' is not accepted"),
    "lr inf": ({"lr": math.inf}, r"not finite at optimizer step 1; .*a lower learning rate"),
}


@pytest.mark.parametrize(("options", "says"), REFUSED.values(), ids=REFUSED)
def test_refusals_say_why(lab, options, says):
    with pytest.raises(UserError, match=says):
        lab.learn(**{"max_steps": 2} | options)


def test_a_batch_may_be_the_ids_alone(lab):
    learner, ids = RoILightningModule(str(lab.model)), torch.arange(24).view(2, 12)
    learner.harden()
    assert len({learner.objective(batch)[0].item() for batch in ({"input_ids": ids}, ids, [ids])}) == 1
    for batch in ((ids, ids), ids[0], {"ids": ids}, "text"):
        with pytest.raises(UserError, match=f"a batch is a {type(batch).__name__}; give token ids"):
            learner.objective(batch)
    with pytest.raises(UserError, match="a loaded model takes no revision, dtype"):
        RoILightningModule(learner.teacher, dtype="float32")
