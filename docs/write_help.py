"""Writes the help of the commands that take a configuration, which the package shows without making their parser."""

import re
from argparse import SUPPRESS, Action
from contextlib import suppress
from importlib.metadata import version
from itertools import chain
from platform import python_version_tuple
from typing import Any, Final, NoReturn
from unittest.mock import patch

from jsonargparse import ArgumentParser, _typehints

from roi_lightning.cli.commands import CONFIGURED, SHORT
from roi_lightning.cli.config_files import EXTENDS
from roi_lightning.cli.lightning import RoICLI, build
from roi_lightning.cli.plan import PlanCLI
from roi_lightning.cli.stored_help import STORED
from roi_lightning.data import CalibrationDataModule
from roi_lightning.learning.roi import RoILightningModule
from roi_lightning.utils.entry_points import added, load

_WIDTH: Final = "100"  # of the texts, in characters
_GROUPS: Final = {
    "model": ("lm", "pattern", "patterns", "dtype", "targets", "ignore", "activation_checkpointing"),
    "method": (
        *("sampler", "tau", "lam", "prior", "prior_strength", "prior_margin", "init_std", "draw_per"),
        *("optimizer", "optimizer.lr", "lr_end", "lr_weights", "distillation", "kept_norm"),
    ),
    "data": ("corpora", "val_corpora", "seq_len", "batch_size", "windows_per_step", "val_windows"),
    "trainer": ("max_steps", "validate_every_steps", "devices", "accelerator", "strategy"),
}
_CLASSES: Final = {"model": RoILightningModule, "data": CalibrationDataModule}
# Links set these: the model's tokenizer and code, the run's seed.
_LINKED: Final = {"model": {"seed"}, "data": {"tokenizer", "tokenizer_revision", "trust_remote_code", "seed"}}
# Those of other packages are not everywhere.
_ALL_SUBCLASSES: Final = _typehints.get_all_subclass_paths
_OURS: Final = ("roi_lightning.", "lightning.", "torch.")
_PARTS: Final = r"(?=^model:$|^other options:$|^--help_all shows)"


def _our_subclasses(*args: Any, **options: Any) -> list[str]:
    return [path for path in _ALL_SUBCLASSES(*args, **options) if path.startswith(_OURS)]


def made_with() -> str:
    """The software that the text depends on."""
    python = ".".join(python_version_tuple()[:2])
    libraries = [
        f"{name} {version(name).partition('+')[0]}" for name in ("jsonargparse", "lightning", "torch")
    ]
    return ", ".join([*libraries, f"Python {python}\n"])


def text() -> str:
    """What is stored."""
    for point in added("classes").values():
        if point.value.startswith(_OURS):
            load(point)
    stored = {"made with": made_with()}
    with (
        patch.dict("os.environ", COLUMNS=_WIDTH),
        patch.object(_typehints, "get_all_subclass_paths", _our_subclasses),
    ):
        for command in sorted(CONFIGURED):
            shown = _grouped(_parser(command)).format_help()
            # The order is that of whoever wrote this union first.
            shown = re.sub(r"Union\[float,(\s+)int,", r"Union[int,\1float,", shown)
            stored[command], *common = re.split(_PARTS, shown, flags=re.MULTILINE)
    stored |= zip(("groups", "others", "end"), common, strict=True)
    linked = [f"--{section}.{name}" for section, names in _LINKED.items() for name in sorted(names)]
    of_classes = [f"--{section}.{name}" for section in _CLASSES for name in ("class_path", "dict_kwargs")]
    stored["unlisted"] = "\n".join([f"--{EXTENDS}", *linked, *of_classes, ""])
    return "".join(f"# {name}\n{part}" for name, part in stored.items())


def _parser(command: str) -> ArgumentParser:
    made: list[ArgumentParser] = []

    def stop(cli: RoICLI, parser: ArgumentParser, args: object) -> NoReturn:
        made.append(parser)
        raise InterruptedError

    with patch.object(RoICLI, "parse_arguments", stop), suppress(InterruptedError):
        build([], command, PlanCLI if command == "plan" else RoICLI)
    return made[0]


def _grouped(parser: ArgumentParser) -> ArgumentParser:
    """Put what a run's parser shows into groups, with the usual learner's and text's options.

    To the parser these are classes, whose options it does not show.
    """
    known = {action.dest: action for action in parser._actions}
    for section, kind in _CLASSES.items():
        of_class = ArgumentParser()
        of_class.add_class_arguments(kind, section, skip=_LINKED[section])
        known |= {action.dest: action for action in of_class._actions if "." in action.dest}
    rate = "Learning rate of the optimizer at the start of the run."
    known["model.optimizer.lr"] = Action([], "model.optimizer.lr", metavar="LR", help=rate, default=SUPPRESS)
    for short, name in SHORT.items():
        known[name.removeprefix("--")].option_strings = [short, name]
    groups = {"run": [name for name in known if "." not in name]}
    for title, names in _GROUPS.items():
        section = "model" if title == "method" else title
        groups[title] = [f"{section}.{name}" for name in names]
    listed = set(chain.from_iterable(groups.values()))
    groups["other options"] = [name for name in known if name not in listed]
    parser._action_groups = []
    for title, members in groups.items():
        parser.add_argument_group(title)._group_actions.extend(known[name] for name in members)
    return parser


if __name__ == "__main__":
    STORED.write_text(text(), encoding="utf-8")
