"""`--help` of the commands that take a configuration: the options that matter in groups, or all of them."""

import argparse
import inspect
from collections.abc import Iterable
from types import NoneType, UnionType
from typing import Any, Final, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

import docstring_parser
from lightning.pytorch import Trainer

from roi_lightning.cli.commands import sentence
from roi_lightning.cli.options import METAVARS, PROGRAM, LineParser, described
from roi_lightning.data import CalibrationDataModule
from roi_lightning.learning.maskpro import MaskProModule
from roi_lightning.learning.proxsparse import ProxSparseModule
from roi_lightning.learning.recipe import spelled
from roi_lightning.learning.recover import RecoveryModule
from roi_lightning.learning.roi import RoILightningModule
from roi_lightning.learning.trainer import RoITrainer
from roi_lightning.samplers import Sampler
from roi_lightning.samplers.schedules import Schedule

# An option that commands without a configuration have too, or that is typed often → its full name.
SHORT: Final = {
    "--lm": "--model.lm",
    "--pattern": "--model.pattern",
    "--patterns": "--model.patterns",
    "--sampler": "--model.sampler",
    "--prior": "--model.prior",
    "--corpora": "--data.corpora",
    "--seq_len": "--data.seq_len",
    "--steps": "--trainer.max_steps",
    "--seed": "--seed_everything",
}
_REQUIRED: Final = "required"
# The data module divides windows over ranks itself; the learner says in a line what it will learn.
TRAINER_DEFAULTS: Final = {
    "use_distributed_sampler": False,
    "max_epochs": 1,
    "log_every_n_steps": 1,  # a step takes seconds
    "enable_model_summary": False,
}
_SET: Final = {"trainer.max_steps": _REQUIRED} | {
    f"trainer.{name}": str(value).lower() for name, value in TRAINER_DEFAULTS.items()
}
_DIFFERENCES: Final = {
    MaskProModule: "as above without RoI's own",
    ProxSparseModule: "as above without RoI's own",
    RecoveryModule: "as above without RoI's own, patterns and globs; --lm is an exported directory",
}
_CLASSES: Final = {"model": RoILightningModule, "data": CalibrationDataModule, "trainer": RoITrainer}
# Links set these: the model's tokenizer and code, the run's seed.
_LINKED: Final = {
    *("data.tokenizer", "data.tokenizer_revision", "data.trust_remote_code", "data.seed", "model.seed")
}
_GROUPS: Final = {
    "model": ("lm", "pattern", "patterns", "dtype", "targets", "ignore", "activation_checkpointing"),
    "method": (
        *("sampler", "tau", "lam", "prior", "prior_strength", "prior_margin", "init_std", "draw_per"),
        *("optimizer", "lr_end", "lr_weights", "distillation", "kept_norm"),
    ),
    "text": ("corpora", "val_corpora", "seq_len", "batch_size", "windows_per_step", "val_windows"),
    "trainer": ("max_steps", "validate_every_steps", "devices", "accelerator", "strategy"),
}
_SECTION: Final = {"model": "model", "method": "model", "text": "data", "trainer": "trainer"}
# Where the class's own words are about something else, or too many for a line.
_WORDS: Final = {
    "model.distillation": "Share of the loss, 0 to 1, that is the divergence from the dense model's predictions; any "
    "above 0 costs one more forward pass.",
    "model.kept_norm": "Coefficient of the reward for keeping large weights, 1e-5 in MaskLLM.",
    "model.lr_end": "Learning rate at the end of the run; --model.optimizer.lr is the one at its start.",
    "model.lr_weights": "Train the weights along with the logits, from this learning rate down; null: frozen.",
    "model.optimizer": "Class path; its options follow, as --model.optimizer.lr X.",
    "model.prior": "Where the logits start: none, magnitude, activation, wanda, sparsegpt, a mask file or an "
    "exported directory.",
    "model.tau": "Softmax temperature by optimizer step: Exponential, Linear, LinearScale, Constant; its options "
    "follow, as --model.tau.start X.",
    "trainer.accelerator": "cpu, gpu, or auto.",
    "trainer.devices": "Devices of this machine: a number, a list of indices, or auto.",
    "trainer.max_steps": "Optimizer steps of the run.",
    "trainer.strategy": "How devices share the work: auto, or a class, as overlays/ddp.yaml and overlays/fsdp2.yaml "
    "choose one.",
    "trainer.validate_every_steps": "Optimizer steps between validations; left out, after the last one.",
}
_FIRST: Final = (
    (
        "-c, --config",
        "FILE",
        "A YAML file, or the bare name of a shipped one; may be repeated, later files win.",
    ),
    (
        "--run",
        "NAME",
        "The run's name; it writes to runs/NAME (default: the configurations' names, joined by +).",
    ),
    (
        "--model",
        "CLASS",
        "What learns: RoILightningModule, MaskProModule, ProxSparseModule, RecoveryModule (the weights that a mask "
        "keeps), or a class path (default: the first).",
    ),
    (
        "--seed",
        "N",
        "Of initial values, noise and the order of the text (default: 0; short for --seed_everything).",
    ),
    ("--print_config", "", "Print the configuration that would run, and exit."),
)
_OWN: Final = {
    "fit": (
        ("--resume", "auto", "Resume from the run's newest complete checkpoint, if there is one."),
        ("--ckpt_path", "FILE", "Resume from this checkpoint."),
        ("--overwrite", "", "Replace the results of an earlier run in this run's folder."),
        ("--allow_changed_settings", "", "Resume from --ckpt_path whatever it was learned with."),
    ),
    "validate": (("--ckpt_path", "FILE", "The checkpoint to measure (required)."),),
    "export": (
        ("--ckpt_path", "FILE", "The checkpoint to export (required)."),
        ("--out", "DIR", "The directory to write (required)."),
        ("--overwrite", "", "Replace an earlier export there."),
        ("--allow_changed_settings", "", "Take the checkpoint whatever it was learned with."),
    ),
    "plan": (
        ("--json", "FILE", "Also write the plan as JSON."),
        ("--fit_in", "SIZE", "Say what makes the run fit in a GPU's memory, like 80GB."),
    ),
}


class Option(NamedTuple):
    """One option of a run: its full name, what it takes, its default spelled, and what it means."""

    name: str
    metavar: str
    default: str
    meaning: str


def help_parser(command: str, everything: bool = False) -> argparse.ArgumentParser:
    """A parser that knows the options of a command by group; it is for help and completion, not for parsing.

    Args:
        command: `fit`, `validate`, `export` or `plan`.
        everything: All options of learners, text and trainer, instead of those that matter.
    """
    parser = LineParser(
        prog=f"{PROGRAM} {command}",
        usage=f"{PROGRAM} {command} --config FILE [options]",
        description=sentence(command),
        epilog=_epilog(command, everything),
        add_help=False,
        allow_abbrev=False,
    )
    fill(parser, command, everything)
    return parser


def fill(parser: argparse.ArgumentParser, command: str, everything: bool) -> None:
    """Give a parser the options of a command by group; see `help_parser`."""
    _add(parser.add_argument_group("run"), [*_FIRST, *_OWN[command]])
    sections = _all_sections() if everything else _short_sections()
    for title, options in sections.items():
        _add(parser.add_argument_group(title), [_row(option) for option in options])
    others = [("-h, --help", "", "Show this."), ("--help_all", "", "Show every option.")]
    _add(parser.add_argument_group("help"), others)


def option_names() -> list[str]:
    """All options of a run by their full and short names, with dashes."""
    names = [f"--{section}.{name}" for section, kind in _CLASSES.items() for name in class_arguments(kind)]
    return [*SHORT, *names, *(words.split(", ")[-1] for words, *_ in [*_FIRST, *_OWN["fit"]])]


def class_arguments(kind: type[object]) -> dict[str, inspect.Parameter]:
    """The arguments of a class and, where `**kwargs` leads on, of its bases, by name."""
    found: dict[str, inspect.Parameter] = {}
    for base in kind.__mro__:
        if "__init__" not in vars(base) or base is object:
            continue
        _, *parameters = inspect.signature(base.__init__).parameters.values()  # type: ignore[misc]
        for each in parameters:
            if each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL):
                found.setdefault(each.name, each)
        if all(each.kind != each.VAR_KEYWORD for each in parameters):
            break
    return found


def _short_sections() -> dict[str, list[Option]]:
    known = {section: _class_options(section, kind) for section, kind in _CLASSES.items()}
    return {title: [known[_SECTION[title]][name] for name in names] for title, names in _GROUPS.items()}


def _all_sections() -> dict[str, list[Option]]:
    sections = {
        f"{kind.__name__} ({section})": list(_class_options(section, kind).values())
        for section, kind in _CLASSES.items()
    }
    roi = _class_options("model", RoILightningModule)
    for kind in _DIFFERENCES:
        own = [option for name, option in _class_options("model", kind).items() if name not in roi]
        sections[f"{kind.__name__} (model): {_DIFFERENCES[kind]}, and"] = own
    return sections


def _class_options(section: str, kind: type[object]) -> dict[str, Option]:
    """The options that set the arguments of a section's class."""
    texts, hints = _descriptions(kind), _annotations(kind)
    arguments = {
        name: each for name, each in class_arguments(kind).items() if f"{section}.{name}" not in _LINKED
    }
    return {
        name: Option(
            f"{section}.{name}",
            _metavar(name, hints.get(name, Any)),
            _SET.get(f"{section}.{name}", _default(each.default)),
            _WORDS.get(f"{section}.{name}", " ".join(texts.get(name, "").replace("`", "").split())),
        )
        for name, each in arguments.items()
    }


def _row(option: Option) -> tuple[str, str, str]:
    full = f"--{option.name}"
    short = next((short for short, name in SHORT.items() if name == full), full)
    notes = [option.default if option.default == _REQUIRED else f"default: {option.default}"]
    notes = notes if option.default else []
    notes += [f"short for {full}"] if short != full else []
    return short, option.metavar, f"{option.meaning} ({'; '.join(notes)})" if notes else option.meaning


def _add(group: Any, rows: Iterable[tuple[str, str, str]]) -> None:
    for names, metavar, text in rows:
        keywords = {"metavar": metavar} if metavar else {"action": "store_true"}
        group.add_argument(
            *names.split(", "), help=text.replace("%", "%%"), default=argparse.SUPPRESS, **keywords
        )


def _epilog(command: str, everything: bool) -> str:
    more = "" if everything else f"{PROGRAM} {command} --help_all shows every option. "
    return (
        f"{more}Dashes and underscores both work. A configuration's own values: add --print_config to fit. "
        "A callback more: --trainer.callbacks+ CLASS."
    )


def _descriptions(kind: type[object]) -> dict[str, str]:
    if not issubclass(kind, Trainer):
        return described(kind)
    lightning = docstring_parser.parse(Trainer.__init__.__doc__ or "")
    return {entry.arg_name: entry.description or "" for entry in lightning.params} | described(kind)


def _annotations(kind: type[object]) -> dict[str, Any]:
    made = [vars(base)["__init__"] for base in reversed(kind.__mro__[:-1]) if "__init__" in vars(base)]
    return {name: hint for init in made for name, hint in get_type_hints(init).items()}


def _default(value: object) -> str:
    if value in (inspect.Parameter.empty, None):
        return "" if value is None else _REQUIRED
    if isinstance(value, type):
        return value.__name__
    if isinstance(value, list | tuple):
        return " ".join(map(str, value)) or "none"
    return str(value).lower() if isinstance(value, bool) else str(spelled(value))


def _metavar(name: str, hint: Any) -> str:
    members = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    # Not the first: typing gives a union's members in the order of whichever module named the union first.
    kind = float if float in members else next((member for member in members if member is not NoneType), Any)
    if kind is bool:
        return "{true,false}"
    if get_origin(kind) is Literal:
        return f"{{{','.join(map(str, get_args(kind)))}}}"
    if kind in METAVARS:
        return METAVARS[kind]
    return "CLASS" if inspect.isclass(kind) and issubclass(kind, Sampler | Schedule) else name.upper()
