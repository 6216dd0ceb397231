"""jsonargparse's errors in a line, with the options and classes that were perhaps meant."""

import inspect
import re
import sys
from typing import Final

import torch
from lightning.pytorch import Callback

from roi_lightning.cli.options import PROGRAM, with_near_options
from roi_lightning.cli.run_help import class_arguments, option_names
from roi_lightning.data import CalibrationDataModule
from roi_lightning.errors import did_you_mean
from roi_lightning.learning import callbacks
from roi_lightning.learning.base import MaskLearningModule
from roi_lightning.samplers import Sampler
from roi_lightning.samplers.schedules import Schedule
from roi_lightning.utils.extras import install
from roi_lightning.utils.third_party import parser_error

_NO_CLASS: Final = re.compile(r"Expected a dot import path string: ([^\s;]+)")
_KEY: Final = re.compile(r'Parser key "(?:\w+\.)*(\w+)"')
_TYPE: Final = re.compile(r"(?:<class '|typing\.)([\w.]+)'?>?")
_BAD_PATH: Final = re.compile(r"Problem with given class_path '([^']+)':\s+(.+)")
_BROKEN_FILE: Final = re.compile(r"- (.+ \(.+\.py, line \d+\))")
_NO_OPTION: Final = re.compile(r"Option '([^']+)' is not accepted")
_NO_MODEL: Final = "the following arguments are required: lm"
_KINDS: Final[dict[str, type[object]]] = {
    "callbacks": Callback,
    "data": CalibrationDataModule,
    "lam": Schedule,
    "model": MaskLearningModule,
    "optimizer": torch.optim.Optimizer,
    "sampler": Sampler,
    "tau": Schedule,
}
_REMEDIES: Final = {
    "No module named 'torchao'": install("8bit"),
    "arguments are required: out": "roi-lightning export ... --out DIR",
    _NO_MODEL: f"{PROGRAM} fit --config quickstart.yaml, or give a model with --lm",
}


def explained(message: str, command: str) -> tuple[str, str]:
    """An error of jsonargparse, and what to try.

    Args:
        message: As jsonargparse words it, over several lines.
        command: The one that was typed.

    Returns:
        The error in a line, and a command or a hint.
    """
    remedy = next(
        (text for sign, text in _REMEDIES.items() if sign in message), f"{PROGRAM} {command} --help"
    )
    if _NO_MODEL in message:
        return "no model to learn on: neither a configuration nor --lm names one", remedy
    key, name = _KEY.search(message), _NO_CLASS.search(message)
    if key and name and key[1] in _KINDS:
        return f"{key[1]} {name[1]!r} is no class{_classes(_KINDS[key[1]], name[1])}", remedy
    if broken := _BROKEN_FILE.search(message):
        return f"the file of a class can't be imported: {broken[1]}", remedy
    path = _BAD_PATH.search(message)
    if key and path and not _NO_OPTION.search(message):
        return f"{key[1]} {path[1]!r} can't be used: {path[2]}{_near_path(path[1], path[2])}", remedy
    told = _TYPE.sub(r"\1", _KEY.sub(_option, parser_error(message))).replace("Expected a ", "expected ")
    if unknown := _NO_OPTION.search(told):
        known = _class_option_names()
        other = "; it is an option of another class than this run's, leave it out"
        return f"{told}{other if unknown[1] in known else did_you_mean(unknown[1], known)}", remedy
    return with_near_options(told, option_names()), remedy


def _near_path(path: str, cause: str) -> str:
    """What was perhaps meant by a class path that names nothing."""
    module, _, name = path.rpartition(".")
    if cause == f"No module named {path.split('.')[0]!r}":
        return "; class paths are looked up in this folder and on Python's path"
    known = [each for each, value in vars(sys.modules.get(module, object)).items() if isinstance(value, type)]
    return did_you_mean(name, known)


def _option(key: re.Match[str]) -> str:
    """The option that a parser's key stands for; the key of a class's argument lacks the section."""
    full = [name for name in option_names() if name.split(".")[1:] == [key[1]]]
    return full[0] if len(full) == 1 else key[0].split('"')[1]


def _classes(kind: type[object], name: str) -> str:
    """The classes of a kind that a name may stand for."""
    known = {each.__name__: each.__module__ for each in _concrete(kind)}
    public = callbacks.__all__ if kind is Callback else known
    ours = ", ".join(sorted(name for name in public if known[name].startswith("roi_lightning")))
    return (
        f"{did_you_mean(name, known) or ';'} choose {f'{ours}, or ' if ours else ''}"
        "a class path like my_module.MyClass"
    )


def _concrete(kind: type[object]) -> set[type[object]]:
    found = {each for child in kind.__subclasses__() for each in _concrete(child)}
    return found if inspect.isabstract(kind) else {kind, *found}


def _class_option_names() -> set[str]:
    kinds = {each for kind in _KINDS.values() for each in _concrete(kind)}
    return {name for kind in kinds for name in class_arguments(kind)}
