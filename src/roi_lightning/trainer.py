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
from roi_lightning.callbacks.sparse_export import SparseExport, export_learned, training_facts
from roi_lightning.checkpoint_files import PlainCheckpointIO, read_checkpoint
from roi_lightning.checkpoints import check_checkpoint, check_resumable, stored_recipe
from roi_lightning.errors import UserError
from roi_lightning.export import check_destination
from roi_lightning.learner import MaskLearner
from roi_lightning.recipe import check_same_run, run_recipe, without_text
from roi_lightning.resuming import checkpoint_folders, newest_checkpoint
from roi_lightning.run_folder import claim_folder, keep_checkpoints_in_folder
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
        overwrite: bool = False,
        allow_changed_settings: bool = False,
    ) -> None:
        """Learn a mask.

        Args:
            model: The learner.
            train_dataloaders: Left to the data module on the command line.
            val_dataloaders: Left to the data module on the command line.
            datamodule: Where the windows come from.
            ckpt_path: Checkpoint to resume from; one that was learned with other settings is refused.
            weights_only: Checkpoints that hold anything but tensors and plain values are refused.
            resume: `auto` resumes from the run's newest whole checkpoint, which is removed once a newer one is
                written; those of other settings are passed over. Without any, the run starts as it would have.
            overwrite: Replace the results of an earlier run in this run's folder, and an earlier export.
            allow_changed_settings: Resume from `ckpt_path` whatever it was learned with; the configuration counts.

        Raises:
            UserError: If the checkpoint is missing, unreadable or of another run, another run's results would be
                replaced, or masks can't be learned with the strategy.
        """
        preemption = self._callback(Preemption)
        self._callback(DueValidation)
        assert isinstance(model, MaskLearner)
        if allow_changed_settings and ckpt_path is None:
            raise UserError("allow_changed_settings is about a checkpoint; name one with --ckpt_path")
        recipe = run_recipe(model, self, datamodule)
        keep_checkpoints_in_folder(self)
        if resume == "auto" and (
            newest := newest_checkpoint(checkpoint_folders(self), recipe, self.max_steps)
        ):
            ckpt_path = preemption.resumed_from = str(newest)
            rank_zero_info(f"resuming from {ckpt_path}")
        elif ckpt_path is not None and allow_changed_settings:
            check_checkpoint(ckpt_path)
        elif ckpt_path is not None:
            check_resumable(ckpt_path, recipe, self.max_steps)
        elif resume == "auto":
            rank_zero_info("no checkpoint to resume from: starting")
        self._check_strategy()
        claim_folder(self, ckpt_path, overwrite)
        for callback in self.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, SparseExport):
                callback.overwrite = overwrite
                callback.preflight(self, recipe)
        self._keep_plain()
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
        if ckpt_path is not None:
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
        overwrite: bool = False,
        allow_changed_settings: bool = False,
    ) -> None:
        """Turn a training checkpoint into a Hugging Face directory and a mask file.

        Args:
            model: The learner, configured as in the run.
            out: Directory to write.
            datamodule: The text of the run, for the card; it is not read.
            ckpt_path: The checkpoint.
            weights_only: Checkpoints that hold anything but tensors and plain values are refused.
            overwrite: Replace an earlier export at `out`.
            allow_changed_settings: Export a checkpoint that was learned with other settings than these.

        Raises:
            UserError: If there is no such checkpoint, it is of another run, or `out` may not be replaced.
        """
        if ckpt_path is None:
            raise UserError("export needs --ckpt_path, a file from the run's checkpoints/ folder")
        check_checkpoint(ckpt_path)
        check_destination(Path(out), overwrite=overwrite)
        learned_with = stored_recipe(ckpt_path)
        if not allow_changed_settings:
            # The text need not be at hand.
            own = without_text(run_recipe(model, self, None))
            check_same_run(own, None if learned_with is None else without_text(learned_with), ckpt_path)
        checkpoint = read_checkpoint(Path(ckpt_path))
        model.on_load_checkpoint(checkpoint)
        model.load_state_dict(checkpoint["state_dict"], strict=False)
        facts = training_facts(model, self, datamodule, checkpoint["global_step"], learned_with or {})
        path = export_learned(model, model.mask_set(), Path(out), facts, overwrite=overwrite)
        rank_zero_info(f"wrote and verified {path}")
