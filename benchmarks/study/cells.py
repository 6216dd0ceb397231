"""What a study runs: methods, cells, and the settings that all cells share."""

import argparse
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from benchmarks.study.effective import effective
from roi_lightning.errors import UserError

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]*")
_PATTERN: Final = re.compile(r"\d+:\d+")


@dataclass(frozen=True)
class Method:
    """A method that learns a mask.

    Attributes:
        name: In the table, and of its folders.
        arguments: Of `fit`, after the shared configurations and before the study's own settings.
        prior: Whether it starts from the study's prior mask.
        text: Whether it learns from the study's text.
        patterns: The only ones it can learn; None for any.
        why: What keeps it from learning others.
    """

    name: str
    arguments: tuple[str, ...] = ()
    prior: bool = True
    text: bool = True
    patterns: tuple[str, ...] | None = None
    why: str = ""

    def learns(self, pattern: str) -> bool:
        """Whether a cell with this pattern can be run."""
        return self.patterns is None or pattern in self.patterns


# They are compared on one objective and, but for those with another of their own, one annealing: the paper's,
# whatever else a shipped configuration finds better.
_OBJECTIVE: Final = ("--model.distillation", "0")
_ANNEALING: Final = ("--config", "overlays/exponential_anneal.yaml")


def _overlay(name: str, **options: Any) -> Method:
    return Method(name, (*_ANNEALING, "--config", f"overlays/{name}.yaml", *_OBJECTIVE), **options)


METHODS: Final = (
    Method("roi", (*_ANNEALING, *_OBJECTIVE)),
    _overlay("maskllm"),
    _overlay("proxsparse", prior=False, patterns=("2:4",), why="its regulariser is made for 2:4"),
    _overlay("maskpro"),
    _overlay("straight_through"),
    _overlay("linear_anneal"),
)


def choose_methods(names: str | None, added: Sequence[str]) -> list[Method]:
    """The methods of `--methods`, in its order, then the added ones; all there are without it.

    Args:
        names: Comma-separated.
        added: `name=arguments of fit`, as typed in a shell; a first word that is a method's name stands for all
            that this method is. One that sets `--model.prior` or `--data.corpora` keeps it, and one with a learner of
            its own gets no prior.

    Raises:
        SystemExit: For a name that is unknown, taken, or no name.
    """
    known = {method.name: method for method in METHODS}
    for text in added:
        name, equals, arguments = text.partition("=")
        if not equals or not _NAME.fullmatch(name) or name in (*known, "prior"):
            raise SystemExit(f"error: --method {text!r}: give 'name=arguments' with a new, plain name")
        known[name] = _added(name, shlex.split(arguments), known)
    added_names = list(known)[len(METHODS) :]
    chosen = list(known) if names is None else [*names.split(","), *added_names]
    for name in chosen:
        if name not in known:
            raise SystemExit(f"error: no method {name!r}; there are {', '.join(known)}")
    return [known[name] for name in dict.fromkeys(chosen)]


def _added(name: str, words: list[str], known: dict[str, Method]) -> Method:
    base = known[words.pop(0)] if words and words[0] in known else Method("")
    own = {word.partition("=")[0] for word in words}
    arguments = (*base.arguments, *words)
    prior = base.prior and "--model.prior" not in own and not _own_learner(words)
    text = base.text and "--data.corpora" not in own
    return replace(base, name=name, arguments=arguments, prior=prior, text=text)


def _own_learner(words: list[str]) -> bool:
    """Whether arguments name another learner than RoI, which may know no prior; it is not imported to be asked."""
    try:
        learner = effective(words, {}).get("model")
    except UserError:  # of a file that is not there, which `fit` will name
        return False
    return isinstance(learner, str) and learner.rpartition(".")[2] != "RoILightningModule"


@dataclass(frozen=True)
class Cell:
    """One run of a study."""

    method: Method
    pattern: str
    tokens: int
    seed: int

    @property
    def name(self) -> str:
        """Its folder, below the study's."""
        return f"{in_folders(self.pattern)}/{self.method.name}/{self.tokens}-seed{self.seed}"


def in_folders(pattern: str) -> str:
    """`2of4` for 2:4."""
    return pattern.replace(":", "of")


@dataclass(frozen=True)
class Study:
    """The settings that all cells share; see `python -m benchmarks.study --help`."""

    out: Path
    roi_data: Path
    lm: str = "smollm2-135m"
    seq_len: int = 512
    batch_size: int = 2
    val_windows: int = 32
    points: int = 8
    prior_windows: int = 64
    prior_seq_len: int = 1024
    eval_windows: int = 64
    eval_seq_len: int = 1024
    text: Sequence[str] = ()
    keep_checkpoints: bool = False
    store: Path | None = None

    @property
    def train(self) -> str:
        """The training text."""
        return str(self.roi_data / "corpus/openstax_train.jsonl.gz")

    @property
    def texts(self) -> dict[str, str]:
        """What is measured at the end, by name."""
        return {
            "wikitext2": str(self.roi_data / "wikitext-2-raw/wiki.test.raw"),
            "openstax_validation": str(self.roi_data / "corpus/openstax_validation.jsonl.gz"),
        } | self.more_texts

    @cached_property
    def more_texts(self) -> dict[str, str]:
        """Those of `--text`.

        Raises:
            SystemExit: For one without a plain name or with the name of another, and if there is no such file.
        """
        found: dict[str, str] = {}
        for given in self.text:
            name, _, file = given.partition("=")
            if (
                not file
                or not _NAME.fullmatch(name)
                or name in ("held_out", "wikitext2", "openstax_validation")
            ):
                raise SystemExit(f"error: --text {given!r}: give NAME=FILE with a new, plain name")
            if not Path(file).is_file():
                raise SystemExit(f"error: --text {given!r}: there is no file {file!r}")
            found[name] = file
        return found

    def prior(self, pattern: str) -> Path:
        """The directory of the mask that all methods of a pattern start from."""
        return self.out / in_folders(pattern) / "prior"

    def portable(self, value: Any) -> Any:
        """Nested values with this machine's paths replaced by the names of their options."""
        if isinstance(value, dict):
            return {key: self.portable(part) for key, part in value.items()}
        if isinstance(value, list | tuple):
            return [self.portable(part) for part in value]
        folders = {"OUT": str(self.out), "ROI_DATA": str(self.roi_data)}
        for name, path in (folders | self.more_texts).items():
            if isinstance(value, str) and (value == path or value.startswith(f"{path}/")):
                return name + value.removeprefix(path)
        return value

    def folder(self, cell: Cell) -> Path:
        """Where all files of a cell are."""
        return self.out / cell.name

    def steps(self, tokens: int) -> int:
        """The optimizer steps that so many tokens take.

        Raises:
            SystemExit: If the last one would not be full.
        """
        per_step = self.seq_len * self.batch_size
        steps, rest = divmod(tokens, per_step)
        if rest or steps < 1:
            near = ", ".join(str(n * per_step) for n in (steps, steps + 1) if n)
            raise SystemExit(f"error: --tokens {tokens} is no multiple of {per_step}, one step; near: {near}")
        return steps

    def data(self, method: Method | None = None) -> dict[str, Any]:
        """The settings of the data module, but for the text of a method that has its own."""
        own_text = method is not None and not method.text
        return ({} if own_text else {"corpora": self.train}) | {
            "val_corpora": self.texts["openstax_validation"],
            "seq_len": self.seq_len,
            "batch_size": self.batch_size,
            "windows_per_step": self.batch_size,
            "val_windows": self.val_windows,
        }


def make_cells(methods: Sequence[Method], args: argparse.Namespace) -> list[Cell]:
    """All cells that can be run; seeds innermost, so that a first row is complete early.

    Raises:
        SystemExit: For an invalid pattern or number.
    """
    patterns = args.patterns.split(",")
    for pattern in patterns:
        if not _PATTERN.fullmatch(pattern):
            raise SystemExit(f"error: --patterns: {pattern!r} is not N:M")
    cells = [
        Cell(method, pattern, tokens, seed)
        for pattern in patterns
        for tokens in _numbers("tokens", args.tokens)
        for method in methods
        for seed in _numbers("seeds", args.seeds)
        if method.learns(pattern)
    ]
    return list(dict.fromkeys(cells))


def left_out(methods: Sequence[Method], patterns: Sequence[str]) -> list[str]:
    """Why rows are missing, a sentence each."""
    return [
        f"{method.name} at {pattern} is left out: {method.why}."
        for pattern in dict.fromkeys(patterns)
        for method in methods
        if not method.learns(pattern)
    ]


def _numbers(option: str, text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise SystemExit(f"error: --{option} {text!r}: give whole numbers with commas between") from None
