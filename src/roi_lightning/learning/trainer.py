"""The Trainer with the settings that learning a mask needs, and `export` as one more thing it can do."""

from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.accelerators import Accelerator, CPUAccelerator
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities import rank_zero_info
from typing_extensions import override

from roi_lightning.data import CalibrationDataModule
from roi_lightning.errors import UserError, user_path
from roi_lightning.export import check_destination
from roi_lightning.learning.base import MaskLearningModule
from roi_lightning.learning.callbacks.interruption import Preemption
from roi_lightning.learning.callbacks.write_masks import SparseExport, export_learned
from roi_lightning.learning.checkpoint_io import PlainCheckpointIO, read_checkpoint
from roi_lightning.learning.fsdp import FSDP2Strategy
from roi_lightning.learning.optim import check_trainer, count_micro_batches
from roi_lightning.learning.recipe import Recipe, check_same_run, run_recipe, without_text
from roi_lightning.learning.resume import check_checkpoint, check_resumable, newest_checkpoint, stored_recipe
from roi_lightning.learning.run_folder import CONFIG, claim_folder, keep_checkpoints_in_folder, lock_folder
from roi_lightning.utils.atomic_io import check_writable
from roi_lightning.utils.devices import denormals_as_zero


class RoITrainer(Trainer):
    """A Trainer that counts in windows and optimizer steps, reads only plain tensors from checkpoints and can export.

    Args:
        validate_every_steps: Optimizer steps between validations, on any number of devices. If left out, Lightning
            validates after the last step, and never on streamed text. `val_check_interval`, if given, wins.
        accumulate_grad_batches: Micro-batches per optimizer step on each device; if left out, they follow from
            `data.windows_per_step`.
        val_check_interval: As in Lightning: micro-batches between validations, or a share of the run, or a time.
        accelerator: As in Lightning, but `auto` is a CUDA GPU or the CPU, never a Mac's MPS.
        options: Of Lightning's Trainer.

    Raises:
        UserError: If the accelerator is neither a CPU nor a CUDA GPU that is there.
    """

    def __init__(
        self,
        *,
        validate_every_steps: int | None = None,
        accumulate_grad_batches: int | None = None,
        val_check_interval: int | float | str | timedelta | dict[str, int] | None = None,
        accelerator: str | Accelerator = "auto",
        **options: Any,
    ) -> None:
        parts = 1 if accumulate_grad_batches is None else accumulate_grad_batches
        if accelerator == "auto":
            accelerator = "cuda" if torch.cuda.is_available() else "cpu"
        elif not (
            accelerator == "cpu" or isinstance(accelerator, CPUAccelerator) or torch.cuda.is_available()
        ):
            raise UserError(f"no CUDA GPU for trainer.accelerator {accelerator!r}; set it to auto or cpu")
        super().__init__(
            accelerator=accelerator,
            accumulate_grad_batches=parts,
            val_check_interval=val_check_interval,
            **options,
        )
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
        overwrite: bool = False,
        allow_changed_settings: bool = False,
    ) -> None:
        """Learn a mask.

        Args:
            model: The learner.
            train_dataloaders: Left to the data module on the command line.
            val_dataloaders: Left to the data module on the command line.
            datamodule: Where the windows come from.
            ckpt_path: Checkpoint to resume from; a checkpoint with other settings is refused.
            weights_only: Refuse checkpoints that hold anything except tensors and plain values.
            resume: `auto` resumes from the run's newest complete checkpoint and skips those with other settings; if
                there is none, the run starts. The checkpoint is removed once a newer one is written.
            overwrite: Replace the results of an earlier run in this run's folder, and an earlier export.
            allow_changed_settings: Resume from `ckpt_path` although its settings differ; the configuration's count.

        Raises:
            UserError: If the checkpoint is missing, unreadable or of another run, another run's results would be
                replaced, or masks can't be learned with these settings.
        """
        self.count_micro_batches(train_dataloaders if datamodule is None else datamodule)
        assert isinstance(model, MaskLearningModule)
        recipe = run_recipe(model, self, datamodule)
        keep_checkpoints_in_folder(self)
        ckpt_path = self._checkpoint(ckpt_path, resume, recipe, allow_changed_settings)
        self._check_strategy()
        self._claim(ckpt_path, recipe, overwrite)
        self._keep_plain()
        self._preemption()
        with lock_folder(self), denormals_as_zero():
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
            weights_only: Refuse checkpoints that hold anything except tensors and plain values.

        Returns:
            A list with one dictionary of metrics.

        Raises:
            UserError: If the checkpoint is missing or unreadable.
        """
        if ckpt_path is not None:
            check_checkpoint(ckpt_path)
        self._keep_plain()
        with denormals_as_zero():
            return super().validate(model, dataloaders, ckpt_path, verbose, datamodule, weights_only)

    def _checkpoint(
        self, path: str | None, resume: str | None, recipe: Recipe, allow_changed_settings: bool
    ) -> str | None:
        """The checkpoint to start from, checked."""
        if allow_changed_settings and path is None:
            raise UserError("allow_changed_settings is about a checkpoint; name one with --ckpt_path")
        if resume == "auto":
            newest = newest_checkpoint(self, recipe)
            rank_zero_info(f"resuming from {newest}" if newest else "no checkpoint of this run is here")
            if newest is not None:
                self._preemption().resumed_from = str(newest)
                return str(newest)
        if path is not None and allow_changed_settings:
            check_checkpoint(path)
        elif path is not None:
            check_resumable(path, recipe, self.max_steps)
        return path

    def _preemption(self) -> Preemption:
        """The callback that saves on SIGTERM, added if the configuration has none."""
        found = next((x for x in self.callbacks if isinstance(x, Preemption)), None)  # type: ignore[attr-defined]
        if found is None:
            found = Preemption()
            self.callbacks.insert(0, found)  # type: ignore[attr-defined]
        return found

    def _claim(self, ckpt_path: str | None, recipe: Recipe, overwrite: bool) -> None:
        """Make sure that this run can write, and replaces no other's results, or is meant to."""
        for folder in (self.default_root_dir, *(logger.save_dir for logger in self.loggers)):
            check_writable(Path(folder or ".") / CONFIG)
        claim_folder(self, ckpt_path, overwrite)
        for callback in self.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, SparseExport):
                callback.overwrite = overwrite
                callback.preflight(self, recipe)

    def _check_strategy(self) -> None:
        if not isinstance(self.strategy, SingleDeviceStrategy | DDPStrategy | FSDP2Strategy):
            raise UserError(
                f"masks can't be learned with trainer.strategy {type(self.strategy).__name__}; choose one device, "
                "DDPStrategy (overlays/ddp.yaml) or FSDP2Strategy (overlays/fsdp2.yaml)"
            )

    def _keep_plain(self) -> None:
        if type(self.strategy.checkpoint_io) is TorchCheckpointIO:
            self.strategy.checkpoint_io = PlainCheckpointIO()

    def export(
        self,
        model: MaskLearningModule,
        out: str,
        datamodule: LightningDataModule | None = None,
        ckpt_path: str | None = None,
        weights_only: Literal[True] = True,
        overwrite: bool = False,
        allow_changed_settings: bool = False,
    ) -> None:
        """Turn a training checkpoint into a Hugging Face directory and a mask file.

        Args:
            model: The learner, configured as in the run.
            out: Directory to write.
            datamodule: The text of the run, for the model card; it is not read.
            ckpt_path: The checkpoint to export.
            weights_only: Refuse checkpoints that hold anything except tensors and plain values.
            overwrite: Replace an earlier export at `out`.
            allow_changed_settings: Export a checkpoint that was learned with other settings than these.

        Raises:
            UserError: If there is no such checkpoint, it is of another run, or `out` may not be replaced.
        """
        if ckpt_path is None:
            raise UserError("export needs --ckpt_path; give a file from the run's checkpoints/ folder")
        check_checkpoint(ckpt_path)
        check_destination(user_path(out), overwrite=overwrite)
        learned_with = stored_recipe(ckpt_path)
        if not allow_changed_settings:
            # The text need not be at hand.
            own = without_text(run_recipe(model, self, None))
            check_same_run(own, without_text(learned_with), ckpt_path)
        checkpoint = read_checkpoint(Path(ckpt_path))
        model.on_load_checkpoint(checkpoint)
        model.load_state_dict(checkpoint["state_dict"], strict=False)
        model.run_recipe = learned_with
        windows = None
        if isinstance(datamodule, CalibrationDataModule):
            self.datamodule = datamodule
            if self._given.accumulate_grad_batches is None:
                windows = datamodule.windows_per_step  # other devices may have learned than the ones here
        path = export_learned(model, self, user_path(out), overwrite=overwrite, windows_per_step=windows)
        rank_zero_info(f"wrote and verified {path}")
