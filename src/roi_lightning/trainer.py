"""The Trainer with the settings that learning a mask needs, and `export` as one more thing it can do."""

from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, TypeVar

from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities import rank_zero_info
from typing_extensions import override

from roi_lightning.callbacks.due_validation import DueValidation
from roi_lightning.callbacks.preemption import Preemption
from roi_lightning.checkpoint_files import PlainCheckpointIO, read_checkpoint
from roi_lightning.checkpoints import check_checkpoint
from roi_lightning.data import CalibrationDataModule
from roi_lightning.errors import UserError
from roi_lightning.export import check_destination, write_export
from roi_lightning.learner import MaskLearner
from roi_lightning.resuming import checkpoint_folders, newest_checkpoint
from roi_lightning.run_settings import check_trainer, count_micro_batches
from roi_lightning.sharded_strategy import ShardedStrategy

_Callback = TypeVar("_Callback", bound=Callback)


class RoITrainer(Trainer):
    """A Trainer that counts in windows and optimizer steps, reads only plain tensors from checkpoints and can export.

    Args:
        validate_every_steps: Optimizer steps between validations, on any number of devices; None leaves it to
            Lightning, which validates after the last one, and never on streamed text. `val_check_interval` wins.
        accumulate_grad_batches: Micro-batches of an optimizer step on each device; None is as many as
            `data.windows_per_step` makes.
        val_check_interval: As in Lightning: micro-batches between validations, or a share of the run, or a time.
        options: Of Lightning's Trainer.
    """

    def __init__(
        self,
        *,
        validate_every_steps: int | None = None,
        accumulate_grad_batches: int | None = None,
        val_check_interval: int | float | str | timedelta | dict[str, int] | None = None,
        **options: Any,
    ) -> None:
        parts = 1 if accumulate_grad_batches is None else accumulate_grad_batches
        super().__init__(accumulate_grad_batches=parts, val_check_interval=val_check_interval, **options)
        self.validate_every_steps = validate_every_steps
        self._given = SimpleNamespace(
            accumulate_grad_batches=accumulate_grad_batches,
            val_check_interval=val_check_interval,
            validate_every_steps=validate_every_steps,
        )

    def count_micro_batches(self, data: Any) -> None:
        """Set what Lightning counts in micro-batches by windows and optimizer steps, for the devices there are.

        Args:
            data: Where the windows come from.

        Raises:
            UserError: For settings under which a mask can't be learned, or windows that can't be divided.
        """
        check_trainer(self)
        if not self.fast_dev_run:  # type: ignore[attr-defined]  # which counts micro-batches itself
            counted = data if isinstance(data, CalibrationDataModule) else None
            count_micro_batches(self, self._given, counted, self.world_size)

    def _windows_per_step(self, data: CalibrationDataModule) -> int:
        if self._given.accumulate_grad_batches is None and data.windows_per_step is not None:
            return data.windows_per_step  # also where other devices learned than the ones here
        return data.batch_size * self.accumulate_grad_batches * self.world_size

    @override
    def fit(  # type: ignore[override]
        self,
        model: LightningModule,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        datamodule: LightningDataModule | None = None,
        ckpt_path: str | None = None,
        weights_only: Literal[True] = True,
        resume: Literal["auto"] | None = None,
    ) -> None:
        """Learn a mask.

        Args:
            model: The learner.
            train_dataloaders: Left to the data module on the command line.
            val_dataloaders: Left to the data module on the command line.
            datamodule: Where the windows come from.
            ckpt_path: Checkpoint to go on from; its hyperparameters are ignored, the configuration counts.
            weights_only: Checkpoints that hold anything but tensors and plain values are refused.
            resume: `auto` goes on from the newest whole checkpoint of this configuration's runs, which is removed
                once a newer one is written; without any, the run starts as it would have.

        Raises:
            UserError: If the checkpoint is missing or unreadable, or masks can't be learned with these settings.
        """
        data = train_dataloaders if datamodule is None else datamodule
        self.count_micro_batches(data)
        preemption = self._callback(Preemption)
        self._callback(DueValidation)
        if resume == "auto" and (newest := newest_checkpoint(checkpoint_folders(self))):
            ckpt_path = preemption.resumed_from = str(newest)
        if resume is not None:
            rank_zero_info(f"going on from {ckpt_path}" if ckpt_path else "no checkpoint yet: starting")
        check_checkpoint(ckpt_path)
        self._check_strategy()
        self._keep_plain()
        if isinstance(data, CalibrationDataModule):
            ranks, parts, size = self.world_size, self.accumulate_grad_batches, data.batch_size
            made_of = f"devices {ranks} x micro-batches {parts} x data.batch_size {size}"
            rank_zero_info(f"windows of a step: {ranks * parts * size} ({made_of})")
        super().fit(model, train_dataloaders, val_dataloaders, datamodule, ckpt_path, weights_only)

    @override
    def validate(  # type: ignore[override]
        self,
        model: LightningModule | None = None,
        dataloaders: Any = None,
        ckpt_path: str | None = None,
        verbose: bool = True,
        datamodule: LightningDataModule | None = None,
        weights_only: Literal[True] = True,
    ) -> Any:
        """Measure loss and perplexity of the hardened mask on the held-out text.

        Args:
            model: The learner.
            dataloaders: Left to the data module on the command line.
            ckpt_path: The checkpoint to measure.
            verbose: Print the result.
            datamodule: Where the windows come from.
            weights_only: Checkpoints that hold anything but tensors and plain values are refused.

        Returns:
            A list with one dictionary of metrics.

        Raises:
            UserError: If the checkpoint is missing or unreadable.
        """
        check_checkpoint(ckpt_path)
        self._callback(DueValidation)  # or Lightning would warn of its place in the checkpoint
        self._keep_plain()
        return super().validate(model, dataloaders, ckpt_path, verbose, datamodule, weights_only)

    def _callback(self, kind: type[_Callback]) -> _Callback:
        """The callback of a kind, made if there is none."""
        callbacks: list[Callback] = self.callbacks  # type: ignore[attr-defined]
        if not any(isinstance(callback, kind) for callback in callbacks):
            callbacks.insert(0, kind())
        return next(callback for callback in callbacks if isinstance(callback, kind))

    def _check_strategy(self) -> None:
        if not isinstance(self.strategy, SingleDeviceStrategy | DDPStrategy | ShardedStrategy):
            raise UserError(
                f"masks can't be learned with trainer.strategy {type(self.strategy).__name__}; choose one device, "
                "DDPStrategy (overlays/ddp.yaml) or ShardedStrategy (overlays/fsdp2.yaml)"
            )

    def _keep_plain(self) -> None:
        if type(self.strategy.checkpoint_io) is TorchCheckpointIO:
            self.strategy.checkpoint_io = PlainCheckpointIO()

    def export(
        self,
        model: MaskLearner,
        out: str,
        datamodule: LightningDataModule | None = None,
        ckpt_path: str | None = None,
        weights_only: Literal[True] = True,
    ) -> None:
        """Turn a training checkpoint into a Hugging Face directory and a mask file.

        Args:
            model: The learner, configured as in the run.
            out: Directory to write.
            datamodule: The text of the run, for the card; it is not read.
            ckpt_path: The checkpoint.
            weights_only: Checkpoints that hold anything but tensors and plain values are refused.

        Raises:
            UserError: If there is no such checkpoint, it is of another model, or `out` is not ours to replace.
        """
        if ckpt_path is None:
            raise UserError("export needs --ckpt_path, a file from the run's checkpoints/ folder")
        check_checkpoint(ckpt_path)
        check_destination(Path(out), None)
        checkpoint = read_checkpoint(Path(ckpt_path))
        model.on_load_checkpoint(checkpoint)
        model.load_state_dict(checkpoint["state_dict"], strict=False)
        step = checkpoint["global_step"]
        text: dict[str, object] = {}
        if isinstance(datamodule, CalibrationDataModule):
            text = datamodule.facts(step * self._windows_per_step(datamodule))
        training = {"step": step, **model.training_facts(), **text}
        masks = model.mask_set()
        path = write_export(
            model.source, masks, Path(out), dtype=model.stored_dtype, training=training, lm=model.lm
        )
        rank_zero_info(f"wrote and verified {path}")
