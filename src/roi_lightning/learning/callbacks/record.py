"""Keep the record of every run, whatever logger it has."""

import importlib.metadata
import os
import platform
import subprocess
import time
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities import rank_zero_only
from typing_extensions import override

from roi_lightning.data import CalibrationDataModule
from roi_lightning.errors import UserError, reason
from roi_lightning.export.sidecar import command_line
from roi_lightning.learning.base import MaskLearningModule
from roi_lightning.learning.callbacks.base import FinishCallback
from roi_lightning.learning.callbacks.interruption import PreemptedError
from roi_lightning.learning.callbacks.media import log_hyperparameters
from roi_lightning.learning.run_folder import run_folder
from roi_lightning.reports.run_files import RECORD
from roi_lightning.reports.run_record import Kind, append
from roi_lightning.utils.devices import memory_of

_PACKAGES: Final = ("roi-lightning", "torch", "transformers", "lightning")


class KeepRecord(FinishCallback):
    """Appends the start, the metrics and the end of a run to `record.jsonl` in its folder.

    `fit` of the command line adds it by itself, after the callbacks of the configuration, so that the end is recorded
    once masks and the export are written. Hyperparameters go to every logger here, too.
    """

    def __init__(self) -> None:
        super().__init__()
        self._began: float | None = None
        self._logger: RecordLogger | None = None

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            self._began, self._finished = None, False
            self._logger = RecordLogger(self, trainer)
            trainer.loggers.append(self._logger)

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self._logger in trainer.loggers:
            trainer.loggers.remove(self._logger)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.begin(trainer)
        assert isinstance(pl_module, MaskLearningModule)
        log_hyperparameters(trainer.loggers, pl_module.run_recipe)

    def begin(self, trainer: Trainer) -> None:
        """Record the start, unless it is."""
        if self._began is None:
            self._began = time.monotonic()
            self.write(trainer, "start", _start(trainer))

    @override
    def finish(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.begin(trainer)  # a run that resumed from its last step trains none
        self._end(trainer, "finished")

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if self._began is None:
            return
        told = isinstance(exception, KeyboardInterrupt | PreemptedError)
        with suppress(UserError):  # what ended the run may be what this would fail of
            self._end(trainer, "interrupted" if told else "failed", None if told else _message(exception))

    def _end(self, trainer: Trainer, status: str, message: str | None = None) -> None:
        assert self._began is not None
        seconds = round(time.monotonic() - self._began, 1)
        step = trainer.global_step
        end = {"time": _now(), "status": status, "step": step, "message": message, "seconds": seconds}
        self.write(trainer, "end", end)

    def write(self, trainer: Trainer, kind: Kind, fields: dict[str, Any]) -> None:
        """Append a line on the first rank."""
        if trainer.is_global_zero:
            append(run_folder(trainer) / RECORD, kind, fields)


class RecordLogger(Logger):
    """Records scalars by the number of optimizer steps done, which Lightning counts from 0 or from 1.

    Args:
        record: Where they go.
        trainer: Of the run.
    """

    def __init__(self, record: KeepRecord, trainer: Trainer) -> None:
        super().__init__()
        self._record, self._trainer = record, trainer

    @property
    @override
    def name(self) -> str:
        return "record"

    @property
    @override
    def version(self) -> str:
        return ""

    @property
    @override
    def save_dir(self) -> str:
        return str(run_folder(self._trainer))

    @override
    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: they stand in the start."""

    @override
    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self._record.begin(self._trainer)
        values = {tag: float(value) for tag, value in metrics.items() if tag != "epoch"}
        done = {"step": self._trainer.global_step, "time": time.time(), "values": values}
        self._record.write(self._trainer, "metrics", done)


def _start(trainer: Trainer) -> dict[str, Any]:
    learner = trainer.lightning_module
    assert isinstance(learner, MaskLearningModule)
    return {
        "time": _now(),
        "step": trainer.global_step,
        "resumed_from": None if trainer.ckpt_path is None else str(trainer.ckpt_path),
        "command": command_line() or [],
        "max_steps": trainer.max_steps,
        "seed": learner.seed,
        "commit": _commit(),
        "versions": {name.replace("-", "_"): importlib.metadata.version(name) for name in _PACKAGES}
        | {"python": platform.python_version()},
        "machine": _machine(trainer),
        "run": _run(learner, trainer),
    }


def _run(learner: MaskLearningModule, trainer: Trainer) -> dict[str, Any]:
    facts = {
        "model": learner.source.spec,
        "learner": type(learner).__name__,
        "method": learner.method,
        "pattern": str(learner.pattern),
        **learner.mixed_patterns,
        "learned_parameters": sum(p.numel() for p in learner.parameters() if p.requires_grad),
        "layers": len(learner.layers),
        "masked_weights": sum(layer.weight.numel() for layer in learner.layers.values()),
    }
    data = trainer.datamodule  # type: ignore[attr-defined]
    if isinstance(data, CalibrationDataModule):
        windows = data.batch_size * trainer.accumulate_grad_batches * trainer.world_size
        facts |= {
            "corpora": [corpus.title for corpus in data.corpora],
            "seq_len": data.seq_len,
            "windows_per_step": windows,
            "tokens_per_step": windows * data.seq_len,
        }
    return facts | {"settings": learner.run_recipe}


def _machine(trainer: Trainer) -> dict[str, Any]:
    device = trainer.strategy.root_device
    cpu = torch.cpu.get_capabilities().get("cpu_name") or platform.machine()
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    return {
        "device": name if trainer.world_size == 1 else f"{trainer.world_size} x {name}",
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory_of(torch.device("cpu")) / 2**30, 1),
        "os": f"{platform.system()} {platform.machine()}",
    }


def _commit() -> str | None:
    """Of the repository that the run was started in, if it was."""
    command = ["git", "rev-parse", "HEAD"]
    with suppress(OSError, subprocess.SubprocessError):
        said = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True, cwd=Path.cwd())
        return said.stdout.strip()
    return None


def _message(exception: BaseException) -> str:
    told = reason(exception)
    return told if isinstance(exception, UserError) else f"{type(exception).__name__}: {told}"


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
