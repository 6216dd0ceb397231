"""The help of the commands that take a configuration: the options that matter in groups, or all of them."""

from itertools import chain
from typing import Final

from jsonargparse import ArgumentParser

from roi_lightning.cli.commands import SHORT
from roi_lightning.data import CalibrationDataModule
from roi_lightning.learning.roi import RoILightningModule

_GROUPS: Final = {
    "model": ("lm", "pattern", "patterns", "dtype", "targets", "ignore", "activation_checkpointing"),
    "method": (
        *("sampler", "tau", "lam", "prior", "prior_strength", "prior_margin", "init_std", "draw_per"),
        *("optimizer", "lr_end", "lr_weights", "distillation", "kept_norm"),
    ),
    "data": ("corpora", "val_corpora", "seq_len", "batch_size", "windows_per_step", "val_windows"),
    "trainer": ("max_steps", "validate_every_steps", "devices", "accelerator", "strategy"),
}
_CLASSES: Final = {"model": RoILightningModule, "data": CalibrationDataModule}
# Links set these: the model's tokenizer and code, the run's seed.
_LINKED: Final = {"model": {"seed"}, "data": {"tokenizer", "tokenizer_revision", "trust_remote_code", "seed"}}


def group_options(parser: ArgumentParser, everything: bool = False) -> None:
    """Put what a run's parser shows into groups, with the usual learner's and text's options.

    To the parser these are classes, whose options it does not show.

    Args:
        parser: Of the whole command; it is good for help alone afterwards.
        everything: All options, instead of those that matter.
    """
    known = {action.dest: action for action in parser._actions}
    for section, kind in _CLASSES.items():
        of_class = ArgumentParser()
        of_class.add_class_arguments(kind, section, skip=_LINKED[section])
        known |= {action.dest: action for action in of_class._actions if "." in action.dest}
    for short, name in SHORT.items():
        known[name.removeprefix("--")].option_strings = [short, name]
    groups = {"run": [name for name in known if "." not in name]}
    for title, names in _GROUPS.items():
        section = "model" if title == "method" else title
        groups[title] = [f"{section}.{name}" for name in names]
    if everything:
        listed = set(chain.from_iterable(groups.values()))
        groups["other options"] = [name for name in known if name not in listed]
    parser._action_groups = []
    for title, members in groups.items():
        parser.add_argument_group(title)._group_actions.extend(known[name] for name in members)
