"""The commands that take a configuration: LightningCLI over the learners and the calibration data."""

import sys
import warnings
from collections.abc import Sequence
from typing import Any, Final, NoReturn

from lightning.pytorch.callbacks import ProgressBar, RichProgressBar
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from typing_extensions import override

# Imported so that YAML may name them without their module.
from roi_lightning import callbacks, samplers, schedules  # noqa: F401
from roi_lightning.callbacks import PlainProgress, SparseExport
from roi_lightning.config_files import ConfigByName
from roi_lightning.data import CalibrationDataModule
from roi_lightning.learner import MaskLearner
from roi_lightning.module import RoILightningModule
from roi_lightning.trainer import RoITrainer

_DEFAULT_LEARNER: Final = f"{RoILightningModule.__module__}.{RoILightningModule.__qualname__}"
_ERROR_LINES: Final = 3


class Parser(LightningArgumentParser):
    """A parser whose errors are a few lines."""

    @override
    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        lines = [line.strip() for line in message.splitlines() if line.strip()]
        program = self.prog.split(" [")[0]
        sys.stderr.write("error: " + "\n  ".join(lines[:_ERROR_LINES]) + "\n")
        sys.stderr.write(f"try: {program} --help\n")
        self.exit(2)
        raise AssertionError("exit returned")


class RoICLI(LightningCLI):
    """LightningCLI with bare config names, one seed, the tokenizer linked to the model, and `export`."""

    @override
    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        kwargs.setdefault("prog", "python -m roi_lightning")
        parser = self.parser_class(**kwargs)
        parser.add_argument(
            "-c",
            "--config",
            action=ConfigByName,
            help="A YAML file, or the bare name of a shipped one; may be repeated, later files win.",
        )
        return parser

    @override
    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.set_defaults({"model": {"class_path": _DEFAULT_LEARNER}})
        parser.link_arguments("model.init_args.lm", "data.tokenizer")
        parser.link_arguments("model.init_args.revision", "data.tokenizer_revision")
        parser.link_arguments("model.init_args.trust_remote_code", "data.trust_remote_code")
        parser.link_arguments("seed_everything", "data.seed", compute_fn=_seed)
        parser.link_arguments("seed_everything", "model.init_args.seed", compute_fn=_seed)

    @staticmethod
    @override
    def subcommands() -> dict[str, set[str]]:
        data = {"model", "train_dataloaders", "val_dataloaders", "dataloaders", "datamodule"}
        return {"fit": data, "validate": data, "export": data}

    @override
    def instantiate_trainer(self, **kwargs: Any) -> RoITrainer:
        config = self._get(self.config_init, "trainer", default={})
        chosen = config.get("callbacks") or []
        wants_bar = config.get("enable_progress_bar") is not False
        if wants_bar and not any(isinstance(callback, ProgressBar) for callback in chosen):
            bar = RichProgressBar() if sys.stderr.isatty() else PlainProgress()
            config["callbacks"] = [*chosen, bar]
        trainer = super().instantiate_trainer(**kwargs)
        assert isinstance(trainer, RoITrainer)
        return trainer

    def before_fit(self) -> None:
        """Find every mistake that can be found before text is tokenised and weights are read."""
        self.model.preflight()
        for callback in self.trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, SparseExport):
                callback.preflight(self.trainer)


def run(args: Sequence[str]) -> None:
    """Run `fit`, `validate` or `export`.

    Args:
        args: The command line after the program's name.
    """
    # Lightning 2.6 on torch 2.13 uses a deprecated helper of torch; nothing a user could do about it.
    warnings.filterwarnings("ignore", message=".*treespec, LeafSpec", category=FutureWarning)
    # The loader's order is a function of the seed and the step; workers are for streaming corpora.
    warnings.filterwarnings("ignore", message=".*does not have many workers")
    build(list(args), run=True)


def build(args: list[str], run: bool, cli: type[RoICLI] = RoICLI) -> RoICLI:
    """Make the command line interface.

    Args:
        args: Command-line arguments.
        run: Whether the first of them is a subcommand to run; otherwise they are only parsed and instantiated.
        cli: The class to make.
    """
    return cli(
        MaskLearner,
        CalibrationDataModule,
        trainer_class=RoITrainer,
        # The data module divides windows over ranks itself; the learner says in a line what it will learn.
        trainer_defaults={"use_distributed_sampler": False, "max_epochs": 1, "enable_model_summary": False},
        save_config_kwargs={"overwrite": True},
        seed_everything_default=0,
        subclass_mode_model=True,
        parser_class=Parser,
        # LightningCLI warns where it is given what it would have read itself.
        args=None if args == sys.argv[1:] else args,
        run=run,
        auto_configure_optimizers=False,
        load_from_checkpoint_support=False,
    )


def _seed(value: bool | int) -> int:
    return 0 if isinstance(value, bool) else value
