"""The Trainer with the settings that learning a mask needs, and `export` as one more thing it can do."""

from pathlib import Path
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
from roi_lightning.denormals import denormals_as_zero
from roi_lightning.errors import UserError
from roi_lightning.export import check_destination, write_export
from roi_lightning.learner import MaskLearner
from roi_lightning.resuming import checkpoint_folders, newest_checkpoint
from roi_lightning.sharded_strategy import ShardedStrategy

_Callback = TypeVar("_Callback", bound=Callback)


class RoITrainer(Trainer):
    """A Trainer that reads only plain tensors from checkpoints and can export one."""

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
            UserError: If the checkpoint is missing or unreadable, or masks can't be learned with the strategy.
        """
        preemption = self._callback(Preemption)
        self._callback(DueValidation)
        if resume == "auto" and (newest := newest_checkpoint(checkpoint_folders(self))):
            ckpt_path = preemption.resumed_from = str(newest)
        if resume is not None:
            rank_zero_info(f"going on from {ckpt_path}" if ckpt_path else "no checkpoint yet: starting")
        check_checkpoint(ckpt_path)
        self._check_strategy()
        self._keep_plain()
        with denormals_as_zero():
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
        with denormals_as_zero():
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
        text = datamodule.facts(self, step) if isinstance(datamodule, CalibrationDataModule) else {}
        training = {"step": step, **model.training_facts(), **text}
        masks = model.mask_set()
        path = write_export(
            model.source, masks, Path(out), dtype=model.stored_dtype, training=training, lm=model.lm
        )
        rank_zero_info(f"wrote and verified {path}")
