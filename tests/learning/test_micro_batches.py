"""Windows of a step and steps between validations stay as asked for, whatever shares or cuts up a step."""

import json
from functools import partial

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint

from helpers.lab import GOING_ON, QUICK_TRAINER, make_lab
from roi_lightning.cli.lightning import build
from roi_lightning.cli.plan import make_plan
from roi_lightning.errors import UserError
from roi_lightning.export import verify_export
from roi_lightning.learning.roi import RoILightningModule
from roi_lightning.learning.trainer import RoITrainer
from roi_lightning.samplers.schedules import Constant

lab = pytest.fixture(make_lab)
pytestmark = GOING_ON
# Devices of a machine, and machines.
RANKS = [(1, 1), (2, 1), (8, 1), (8, 2)]


def papers(lab, *more):
    """The paper's configuration on the tiny model, which reads short windows only."""
    options = ["--model.lm", str(lab.model), "--data.seq_len", "32"]
    return ["--config", "qwen0.5b_2of4.yaml", *options, *more]


def on(devices, nodes):
    """The options with which a run has so many processes, of which none is started here."""
    options = {"accelerator": "cpu", "devices": devices, "num_nodes": nodes, "strategy": "ddp"}
    return [word for name, value in options.items() for word in (f"--trainer.{name}", str(value))]


def counted(*args):
    """The trainer and data of a command line, as `fit` starts with them."""
    cli = build(list(args))
    cli.trainer.count_micro_batches(cli.datamodule)
    return cli.trainer, cli.datamodule


class Seen(Callback):
    """The text of every optimizer step, and the steps after which it was validated."""

    def __init__(self):
        self.windows, self.validated = {}, []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.windows.setdefault(trainer.global_step, []).extend(batch["input_ids"].tolist())

    def on_validation_end(self, trainer, pl_module):
        self.validated.append(trainer.global_step)


# Numbers.


@pytest.mark.parametrize(
    ("devices", "nodes"),
    [RANKS[0], *(pytest.param(*ranks, marks=pytest.mark.slow) for ranks in RANKS[1:-1]), RANKS[-1]],
)
def test_a_step_and_its_validation_are_those_of_the_configuration(lab, devices, nodes):
    command = papers(lab, *on(devices, nodes))
    trainer, data = counted(*command)
    assert trainer.world_size == devices * nodes
    assert trainer.accumulate_grad_batches * data.batch_size * trainer.world_size == 256
    assert trainer.val_check_interval == 250 * trainer.accumulate_grad_batches
    assert trainer.check_val_every_n_epoch is None
    plan = make_plan(command)
    assert (plan["windows_per_step"], plan["steps"], plan["validate_every_steps"]) == (256, 2000, 250)
    assert plan["tokens"] == 2000 * plan["tokens_per_step"] == 2000 * 256 * 32
    assert plan["micro_batches"] == trainer.accumulate_grad_batches


def test_nothing_is_read_for_windows_that_can_t_be_divided(lab, monkeypatch):
    data = lab.data(windows_per_step=3)
    monkeypatch.setattr(data, "prepare_data", lambda: pytest.fail("read text"))
    learner = RoILightningModule(str(lab.model))
    with pytest.raises(UserError, match="windows_per_step is 3"):
        RoITrainer(**QUICK_TRAINER, max_steps=2).fit(learner, datamodule=data)
    assert learner.teacher is None


def test_lightning_s_own_settings_win(lab):
    (lab.folder / "own.yaml").write_text(
        "trainer: {accumulate_grad_batches: 3, val_check_interval: 5, max_steps: 9}\n"
    )
    typed = ["--trainer.accumulate_grad_batches", "1", "--trainer.val_check_interval", "0.5"]
    for more, wanted in ((["--config", "own.yaml"], (3, 5)), (typed, (1, 0.5))):
        trainer, _ = counted(*papers(lab, *more))
        assert (trainer.accumulate_grad_batches, trainer.val_check_interval) == wanted
    trainer, data = counted(*papers(lab, "--trainer.accumulate_grad_batches", "3"))
    assert trainer.val_check_interval == 250 * 3, "the steps still count"
    plan = make_plan(papers(lab, "--config", "own.yaml"))
    assert plan["windows_per_step"] == 3 * data.batch_size
    assert plan["validate_every_steps"] == 5 / 3


# Runs.


def learn(lab, batch_size, ckpt_path=None, windows=4, **more):
    """Seven steps of some windows with a draw each, validated every three."""
    seen = Seen()
    keeper = ModelCheckpoint(lab.folder / "run", "{step}", every_n_train_steps=1, save_top_k=-1)
    trainer = {"enable_checkpointing": True, "limit_val_batches": 1, "validate_every_steps": 3}
    data = lab.data(windows_per_step=windows, batch_size=batch_size)
    # Cold temperatures would magnify how sums round.
    options = {"draw_per": "step", "tau": Constant(0.7), "lam": Constant(0.3)}
    options |= {"optimizer": partial(torch.optim.SGD, lr=0.1), "lr_end": 0.05} | more
    learner, _ = lab.learn(
        7, callbacks=[seen, keeper], trainer=trainer, data=data, ckpt_path=ckpt_path, **options
    )
    seen.logits = learner.state_dict()
    return seen


@pytest.mark.parametrize(("windows", "size", "more"), [(4, 1, {}), (32, 4, {"distillation": 0.5})])
def test_micro_batches_change_neither_text_nor_validations_nor_the_one_draw_of_a_step(
    lab, windows, size, more
):
    whole, parts = (learn(lab, batch_size, windows=windows, **more) for batch_size in (windows, size))
    for seen in (whole, parts):
        assert seen.validated == [3, 6]
        assert sorted(seen.windows) == list(range(7))
        assert [seen.windows[step] for step in range(7)] == text(lab, windows)
    for name, logits in whole.logits.items():
        torch.testing.assert_close(parts.logits[name], logits, rtol=0, atol=1e-5)


def text(lab, windows=4):
    """The text of seven steps of so many windows."""
    data = lab.data()
    data.setup("fit")
    return data.windows("train", 7 * windows).view(7, windows, -1).tolist()


@pytest.mark.parametrize("saved", [*(pytest.param(step, marks=pytest.mark.slow) for step in (2, 5)), 3])
def test_a_run_that_resumes_in_other_micro_batches_keeps_to_its_steps(lab, saved):
    learn(lab, 2)
    seen = learn(lab, 1, str(lab.folder / "run" / f"step={saved}.ckpt"))
    # The checkpoint of step 3 is written before that step's validation, which is done first then.
    assert seen.validated == [step for step in (3, 6) if step >= saved]
    assert [seen.windows[step] for step in range(saved, 7)] == text(lab)[saved:]


def test_an_export_elsewhere_counts_the_windows_of_the_run(lab):
    learn(lab, 2)
    there = RoITrainer(**QUICK_TRAINER, devices=3, strategy="ddp", max_steps=7)
    learner, data = RoILightningModule(str(lab.model)), lab.data(windows_per_step=4)
    path = str(lab.folder / "run" / "step=7.ckpt")
    there.export(learner, "out", data, path, allow_changed_settings=True)
    assert verify_export(lab.folder / "out").ok
    facts = json.loads((lab.folder / "out" / "roi_sparsity.json").read_text())
    assert facts["training"]["tokens"] == 7 * 4 * 32
