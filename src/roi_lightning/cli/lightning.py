"""The commands that take a configuration: LightningCLI over the learners and the calibration data."""

import logging
import os
from argparse import SUPPRESS
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from jsonargparse import Namespace
from jsonargparse.typing import register_type
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_info
from typing_extensions import override

from roi_lightning.cli.commands import COMMANDS, SHORT
from roi_lightning.cli.config_files import EXTENDS, ConfigByName
from roi_lightning.cli.log_folders import leave_folder_open, with_log_folders
from roi_lightning.cli.options import PROGRAM, LineParser, descriptions
from roi_lightning.data import CalibrationDataModule
from roi_lightning.errors import UserError, brief, user_path

# Imported so that YAML may name them without their module.
from roi_lightning.learning.base import MaskLearningModule
from roi_lightning.learning.callbacks.progress import with_progress
from roi_lightning.learning.callbacks.write_masks import HardenMasks, SparseExport
from roi_lightning.learning.optim import check_trainer
from roi_lightning.learning.roi import RoILightningModule
from roi_lightning.learning.run_folder import CONFIG, RUNS, run_folder
from roi_lightning.learning.trainer import RoITrainer
from roi_lightning.masks.pattern import NMPattern
from roi_lightning.models.config import load_config
from roi_lightning.reports.callback import Report  # noqa: F401
from roi_lightning.samplers import schedules  # noqa: F401
from roi_lightning.utils.entry_points import load_named_classes
from roi_lightning.utils.third_party import plain_errors, silence_warnings

_DEFAULT_LEARNER: Final = f"{RoILightningModule.__module__}.{RoILightningModule.__qualname__}"
_DEFAULT_TEXT: Final = f"{CalibrationDataModule.__module__}.{CalibrationDataModule.__qualname__}"
# Options of a command that are no settings of the run.
_FLAGS: Final = ("overwrite", "allow_changed_settings")
_METHODS: Final = ("fit", "validate", "export")  # of the trainer
# Arguments of these that are no options: what they are given, and the flags, which take no value.
_NO_OPTIONS: Final = frozenset(
    {"model", "datamodule", "train_dataloaders", "val_dataloaders", "dataloaders", *_FLAGS}
)
_LONGEST_NAME: Final = 255  # bytes; file systems allow no more
# The data module divides windows over ranks itself; the learner says in a line what it will learn.
_TRAINER_DEFAULTS: Final = {
    "use_distributed_sampler": False,
    "max_epochs": 1,
    "log_every_n_steps": 1,  # a step takes seconds
    "enable_model_summary": False,
}
_CONFIG_HELP: Final = "YAML file, or the bare name of a shipped one; may be repeated, and later files win."
_RUN_HELP: Final = "Name of the run's folder, runs/NAME (default: the configurations' names, joined by +)."
_EPILOG: Final = (
    "--help_all shows every option, and --model.help CLASS the options of another learner. Dashes and underscores "
    "both work. --trainer.callbacks+ CLASS adds a callback."
)
_BEGINNING: Final = ("resume", "ckpt_path", "weights_only", *_FLAGS)
register_type(NMPattern, str, NMPattern, fail_already_registered=False)  # YAML makes 124 of an unquoted 2:4


class Parser(LineParser, LightningArgumentParser):
    """A run's parser, and that of each class inside its configuration."""

    @override
    def add_class_arguments(self, theclass: Any, *args: Any, **kwargs: Any) -> list[str]:
        if isinstance(theclass, type) and issubclass(theclass, CalibrationDataModule):
            # A text file is data: as a configuration of its own its words would become the corpus's name.
            kwargs["sub_configs"] = False
        added: list[str] = super().add_class_arguments(theclass, *args, **kwargs)
        leave_folder_open(self, theclass)
        return added

    @override
    def parse_string(self, content: str, *args: Any, **kwargs: Any) -> Namespace:
        load_named_classes(content)
        parsed: Namespace = super().parse_string(content, *args, **kwargs)
        return parsed


class DroppedOptions(logging.Handler):
    """Shows once which options a change of class has dropped; the parser logs it among much else."""

    def __init__(self) -> None:
        super().__init__()
        self._shown: set[str] = set()

    @override
    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        # What a link gives, each class gets again.
        if (
            "discarding init_args" in message
            and "{'tokenizer': None}" not in message
            and message not in self._shown
        ):
            self._shown.add(message)
            rank_zero_info(brief(message))


class SaveFitConfig(SaveConfigCallback):
    """Keeps the configuration of a run that learns; measuring it, or failing to start, leaves the file alone."""

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Nothing yet: the folder may be an earlier run's, and this run's checkpoint or prior may be refused."""

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # How a run began is no setting: other commands read this file too.
        for name in _BEGINNING:
            self.config.pop(name, None)
        if trainer.is_global_zero:
            options = {"skip_none": False, "skip_validation": True, "overwrite": True}
            self.parser.save(self.config, run_folder(trainer) / CONFIG, **options)


class RoICLI(LightningCLI):
    """LightningCLI with bare config names, one seed, the tokenizer linked to the model, a folder a run, and `export`.

    Commands are no subcommands of the parser: it would take nearly twice as long.

    Args:
        command: `fit`, `validate` or `export`, whose options the parser has then; `run` runs it.
        options: As in `LightningCLI`.
    """

    trainer: RoITrainer

    def __init__(self, command: str, **options: Any) -> None:
        self.command = command
        Parser.command, Parser.reading = f"{PROGRAM} {command}", None
        self._options: list[str] = []  # of the command, which are no settings of the run
        super().__init__(run=False, **options)

    @override
    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        about, usage = COMMANDS[self.command], "%(prog)s --config FILE [options]"
        kwargs |= {"prog": Parser.command, "description": f"{about[0].upper()}{about[1:]}."}
        parser = self.parser_class(**kwargs, usage=usage, epilog=_EPILOG)
        parser.add_argument("-c", "--config", action=ConfigByName, help=_CONFIG_HELP)
        parser.add_argument(f"--{EXTENDS}", type=Any, default=SUPPRESS, help=SUPPRESS)  # in a file
        parser.logger = log = logging.getLogger("roi_lightning.parser")
        log.setLevel(logging.DEBUG)
        log.propagate, log.handlers = False, [DroppedOptions()]
        return parser

    @override
    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.set_defaults(
            {"model": {"class_path": _DEFAULT_LEARNER}, "data": {"class_path": _DEFAULT_TEXT}}
        )
        parser.link_arguments("model.init_args.lm", "data.init_args.tokenizer")
        parser.link_arguments("model.init_args.revision", "data.init_args.tokenizer_revision")
        parser.link_arguments("model.init_args.trust_remote_code", "data.init_args.trust_remote_code")
        parser.link_arguments("seed_everything", "data.init_args.seed", compute_fn=_seed)
        parser.link_arguments("seed_everything", "model.init_args.seed", compute_fn=_seed)
        parser.add_argument("--run", type=str | None, help=_RUN_HELP)
        if self.command in _METHODS:
            self._options = parser.add_method_arguments(RoITrainer, self.command, skip=set(_NO_OPTIONS))
        for action in parser._actions:
            if action.dest == "resume":
                action.nargs, action.const = "?", "auto"
        if self.command in ("fit", "export"):
            texts = descriptions(getattr(RoITrainer, self.command))
            for flag in _FLAGS:
                parser.add_argument(f"--{flag}", action="store_true", help=texts[flag])
            self._options += _FLAGS

    @override
    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        # LightningCLI's own warns when it is given what stands on the command line.
        assert isinstance(args, list)
        words = [_in_full(word) for word in args]
        load_named_classes(" ".join(words))
        with plain_errors():
            self.config = parser.parse_args(words)
        if not hasattr(self.config["trainer"], "callbacks"):
            raise UserError("trainer holds no options; set them by their names")
        if EXTENDS in self.config:
            raise UserError(f"--{EXTENDS} is for a configuration's file; give --config once more")
        if self.command in ("validate", "export") and self.config["ckpt_path"] is None:
            raise UserError(
                f"{self.command} needs --ckpt_path; give a file from the run's checkpoints/ folder"
            )

    @override
    def _set_seed(self) -> None:
        with plain_errors():
            super()._set_seed()

    @override
    def instantiate_classes(self) -> None:
        trainer = self.config["trainer"]
        folder = self._run_folder(trainer["default_root_dir"])
        given = trainer["logger"]
        trainer["logger"] = with_log_folders(given, folder)
        with plain_errors():
            super().instantiate_classes()
        trainer["logger"] = given

    @override
    def instantiate_trainer(self, **kwargs: Any) -> RoITrainer:
        config = self.config_init["trainer"]
        chosen = config.get("callbacks") or []
        chosen = chosen if isinstance(chosen, list) else [chosen]
        if config.get("enable_progress_bar") is not False:
            chosen = with_progress(chosen)
        config["callbacks"] = chosen
        check_trainer(config)
        folder = str(self._run_folder(config.get("default_root_dir")))
        if config.get("logger") in (None, True):
            # It writes from a thread of its own, wherever the process may be by then.
            logs = Path(folder).absolute()
            kwargs["logger"] = TensorBoardLogger(logs, name="", version="", default_hp_metric=False)
        trainer = super().instantiate_trainer(default_root_dir=folder, **kwargs)
        assert isinstance(trainer, RoITrainer)
        return trainer

    def _run_folder(self, root: str | None) -> Path:
        """Where all of a run goes: the folder that was given, or one of the run's name below it or `runs/`.

        Raises:
            UserError: If the name is no name of a folder.
        """
        name: str | None = self.config["run"]
        folder = RUNS if root is None else user_path(root, "trainer.default_root_dir")
        if name is None and root is not None:
            return folder
        if name is None:
            files = self.config["config"] or []
            lm = self.config["model"]["init_args"]["lm"]
            name = "+".join(Path(str(file)).stem for file in files) or Path(lm).name
            # Kept in the run's config.yaml, with which it continues in the same folder.
            self.config["run"] = name
        if Path(name).name != name or name.strip() in ("", "..") or len(os.fsencode(name)) > _LONGEST_NAME:
            raise UserError(
                f"--run is {name!r}; give a plain name of at most {_LONGEST_NAME} bytes, or a folder with "
                "--trainer.default_root_dir"
            )
        return folder / name

    def run(self) -> None:
        """Run the command, after all checks that need neither text nor weights."""
        if self.command == "fit":
            self.datamodule.check_files()
            self.trainer.count_micro_batches(self.datamodule)
            self.model.preflight(self.trainer)
            self.check_length()
            tell_what_is_not_written(self.trainer)
            from roi_lightning.learning.memory_plan import check_fits_device

            check_fits_device(self.model, self.trainer)
        elif self.command == "validate":
            self.check_length()
        options = {name: self.config_init[name] for name in self._options}
        getattr(self.trainer, self.command)(self.model, datamodule=self.datamodule, **options)

    def check_length(self) -> None:
        """Refuse windows that the model can't read."""
        source = self.model.source
        self.datamodule.check_model(source.spec, load_config(source, self.model.trust_remote_code))


def run(args: Sequence[str], cli: type[RoICLI] | None = None) -> None:
    """Run `fit`, `validate` or `export`.

    Args:
        args: The command line after the program's name.
        cli: As for `build`.
    """
    command, *rest = args
    silence_warnings()
    build(rest, command, cli or RoICLI).run()


def build(args: list[str], command: str = "fit", cli: type[RoICLI] = RoICLI) -> RoICLI:
    """Make the command line interface: parse, and make learner, data and trainer.

    Args:
        args: Command-line arguments.
        command: The command whose options they may be, besides those of a run's configuration.
        cli: The class to make.
    """
    return cli(
        command,
        model_class=MaskLearningModule,
        datamodule_class=CalibrationDataModule,
        trainer_class=RoITrainer,
        trainer_defaults=dict(_TRAINER_DEFAULTS),
        save_config_callback=SaveFitConfig,
        save_config_kwargs={"overwrite": True},
        seed_everything_default=0,
        subclass_mode_model=True,
        subclass_mode_data=True,
        parser_class=Parser,
        args=args,
        auto_configure_optimizers=False,
        load_from_checkpoint_support=False,
    )


def tell_what_is_not_written(trainer: Any) -> None:
    """Say so where none of a run's callbacks writes its mask."""
    given = trainer.callbacks if isinstance(trainer.callbacks, list) else [trainer.callbacks]
    if not any(isinstance(callback, HardenMasks | SparseExport) for callback in given):
        remedy = "add HardenMasks and SparseExport to trainer.callbacks, or `extends: quickstart.yaml`"
        rank_zero_info(f"this run writes no mask and no export; {remedy}")


def _in_full(word: str) -> str:
    """An argument with the full name of its option."""
    name, equals, value = word.partition("=")
    return f"{SHORT.get(name, name)}{equals}{value}"


def _seed(value: bool | int) -> int:
    return 0 if isinstance(value, bool) else value
