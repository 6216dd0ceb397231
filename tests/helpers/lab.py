"""What the tests of whole runs share: a tiny model, a small corpus, and ways to run with them."""

import random
import re
import warnings
from functools import partial
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint

from helpers.text_files import write_jsonl
from helpers.tiny_models import tiny_qwen2
from roi_lightning.__main__ import main
from roi_lightning.data import CalibrationDataModule
from roi_lightning.learning.roi import RoILightningModule
from roi_lightning.learning.trainer import RoITrainer
from roi_lightning.reports.callback import Report
from roi_lightning.samplers import Draw

WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "saw", "two", "dogs", "run", "far", "from", "home"]
# Lightning's remarks on going on in the folder of an interrupted run, and with other callbacks.
GOING_ON = [
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`"),
]
QUICK_TRAINER = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "use_distributed_sampler": False,
    "limit_val_batches": 0,
    "num_sanity_val_steps": 0,
    "max_epochs": 1,
}


class PowerCutError(RuntimeError):
    """A run that ends without a word."""


class CutAt(Callback):
    """Cut the power after an optimizer step."""

    def __init__(self, step):
        self.step = step

    def on_train_batch_end(self, trainer, *args):
        if trainer.global_step == self.step:
            raise PowerCutError


class Batches(Callback):
    """The micro-batches of a run, in order."""

    def __init__(self):
        self.seen = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.seen.append(batch["input_ids"].clone())


class Lab:
    """A folder to work in, with a tiny Qwen2 and a text file that are made once and shared."""

    def __init__(self, folder: Path, shared: Path) -> None:
        self.folder, self.shared = folder, shared
        self.model, self.corpus = shared / "model", shared / "corpus.jsonl"
        if not self.corpus.exists():
            shared.mkdir(exist_ok=True)
            tiny_qwen2(self.model)
            words = random.Random(0)
            write_jsonl(self.corpus, (" ".join(words.choices(WORDS, k=40)) for _ in range(60)))

    def options(self, max_steps=4, accumulate=1, model=None):
        """The overrides with which a shipped configuration runs here."""
        return [
            *("--model.lm", str(model or self.model), "--data.corpora", str(self.corpus)),
            *("--data.seq_len", "32", "--data.batch_size", "2", "--trainer.max_steps", str(max_steps)),
            *("--trainer.accumulate_grad_batches", str(accumulate), "--trainer.accelerator", "cpu"),
        ]

    def quick(self, *more, **options):
        """`quickstart.yaml` on the tiny model."""
        start = ["--config", "quickstart.yaml", "--model.prior_windows", "2"]
        return [*start, *self.options(**options), *more]

    def data(self, **options):
        return CalibrationDataModule(
            **{"tokenizer": str(self.model), "corpora": str(self.corpus), "seq_len": 32, "batch_size": 2}
            | options
        )

    def learn(
        self,
        max_steps,
        model=None,
        lr=1e-2,
        callbacks=(),
        trainer=None,
        data=None,
        ckpt_path=None,
        resume=None,
        overwrite=True,
        allow_changed_settings=False,
        kind=RoILightningModule,
        **options,
    ):
        """Fit without the command line; the learner and its trainer."""
        optimizer = partial(torch.optim.AdamW, lr=lr, betas=(0.9, 0.95), weight_decay=0.0)
        learner = kind(str(model or self.model), **{"optimizer": optimizer} | options)
        fitter = RoITrainer(
            **QUICK_TRAINER
            | {"max_steps": max_steps, "callbacks": list(callbacks), "default_root_dir": str(self.folder)}
            | (trainer or {})
        )
        flags = {"overwrite": overwrite, "allow_changed_settings": allow_changed_settings}
        fit(fitter, learner, data or self.data(), ckpt_path=ckpt_path, resume=resume, **flags)
        return learner, fitter


def make_lab(tmp_path, tmp_path_factory, monkeypatch):
    """A fixture's body: work in `tmp_path`, one thread, in processes of its own as well."""
    torch.set_num_threads(1)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Report, "finish", lambda *_: None)  # the time of a whole run; it has tests of its own
    return Lab(tmp_path, tmp_path_factory.getbasetemp() / "lab")


def new_lab(tmp_path_factory):
    """A lab for a fixture that several tests share; nobody works in its folder."""
    return Lab(tmp_path_factory.mktemp("shared"), tmp_path_factory.getbasetemp() / "lab")


def fit(trainer, learner, data, *, overwrite=True, **options):
    """Fit; what an earlier run of the test left in the folder is replaced unless the test says otherwise."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*does not have many workers")
        trainer.fit(learner, datamodule=data, overwrite=overwrite, **options)


def whole_and_resumed(folder, six_steps, saved=3):
    """Six optimizer steps in one go, and resumed from step `saved` after a power cut at the fourth: the same bits.

    `six_steps` takes what `Lab.learn` does. Both learners.
    """

    def steps(name, *more, ckpt_path=None):
        saves = ModelCheckpoint(folder / name, "{step}", every_n_train_steps=saved, save_top_k=-1)
        trainer = {"enable_checkpointing": True, "accumulate_grad_batches": 2}
        return six_steps(callbacks=[saves, *more], trainer=trainer, ckpt_path=ckpt_path)

    whole = steps("whole")
    with pytest.raises(PowerCutError):
        steps("cut", CutAt(4))
    path = folder / "cut" / f"step={saved}.ckpt"
    checkpoint = torch.load(path, weights_only=True)
    assert checkpoint["state_dict"].keys() == whole.state_dict().keys()
    batches = Batches()
    resumed = steps("cut", batches, ckpt_path=str(path))
    assert len(batches.seen) == 2 * (6 - saved)
    for name, layer in whole.tensors.items():
        for learned in layer.learned:
            values = layer.learned[learned]
            assert torch.equal(values, resumed.tensors[name].learned[learned]), (name, learned)
            assert not torch.equal(values, checkpoint["state_dict"][f"lm.{name}.{learned}"]), (name, learned)
    return whole, resumed


def run(*args):
    """Run a command in this process; its exit status."""
    try:
        return main([str(arg) for arg in args])
    except SystemExit as stop:
        return stop.code or 0


def brute_top(scores, n, m):
    """Top n of every m along the last axis by sorting Python lists; the lower index wins ties."""
    rows = []
    for row in scores.tolist():
        kept = []
        for start in range(0, len(row), m):
            group = row[start : start + m]
            best = sorted(range(m), key=lambda i: (-group[i], i))[:n]
            kept += [i in best for i in range(m)]
        rows.append(kept)
    return torch.tensor(rows)


def draw(learner, index=0, lam=0.01, tau=0.3):
    """Give a learner's student the weights of a draw, as a training step does."""
    learner.draws = {
        name: Draw.of(learner.seed, index, name, lam, tau, tensor.first_group)
        for name, tensor in learner.tensors.items()
    }
    learner.fill(learner.draw)


def oriented(pruned, tensor):
    """A tensor as a pruned one is stored, as [out, in]."""
    return pruned.part(tensor)


def plain_text(text):
    """Without colours and box lines, blanks collapsed."""
    return re.sub(r"[\s│┃]+", " ", re.sub(r"\x1b\[[0-9;]*m", "", text))
