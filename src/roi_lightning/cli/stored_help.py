"""What commands that take a configuration say without heavy imports: their help, and that there is no such option.

The parser of a run takes seconds to make. help.txt is what it says of itself; docs/write_help.py writes it.
"""

import re
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from importlib.metadata import version
from itertools import takewhile
from pathlib import Path
from typing import Final

from roi_lightning.cli.commands import SHORT
from roi_lightning.cli.config_files import find_config, read_config, with_extended
from roi_lightning.cli.options import PROGRAM

STORED: Final = Path(__file__).with_name("help.txt")
# Sections with the options of a class → the usual one.
_CLASSES: Final = {"model": "RoILightningModule", "data": "CalibrationDataModule"}
_SECTIONS: Final = {"--model", "--data", "--trainer"}


def answer(command: str, words: Sequence[str]) -> int | None:
    """Print the help if it is asked for, or the first option that there is not.

    Returns:
        The exit status; None where the parser is to read the words.

    Raises:
        UserError: For a configuration that can't be read.
    """
    _, *parts = re.split(r"^# (.+)\n", STORED.read_text(encoding="utf-8"), flags=re.MULTILINE)
    stored = dict(zip(parts[::2], parts[1::2], strict=True))
    shown = stored[command] + stored["groups"]
    if {"-h", "--help", "--help_all"}.intersection(words):
        sys.stdout.write(shown + (stored["others"] if "--help_all" in words else "") + stored["end"])
        return 0
    lines = re.findall(r"^  -.*", shown + stored["others"], re.MULTILINE)
    listed = {name for line in lines for name in re.findall(r"--[\w.]+", line)}
    unknown = _unknown(words, listed.union(stored["unlisted"].split()), _chosen(words))
    # Another version may have options of its own.
    if unknown is None or f"lightning {version('lightning')}," not in stored["made with"]:
        return None
    meant = _meant(unknown, listed)
    sys.stderr.write(f"error: unrecognized arguments: {unknown}{meant}\ntry: {PROGRAM} {command} --help\n")
    return 2


def _chosen(words: Sequence[str]) -> set[str]:
    """The sections whose class may not be the usual one, by the command line or a configuration."""
    lines = "\n".join(words)
    chosen = set(re.findall(r"^--(model|data)(?:\.class_path)?(?:=|$)", lines, re.MULTILINE))
    for name in re.findall(r"^(?:-c|--config)[=\n]([^-].*)", lines, re.MULTILINE):
        for content in map(read_config, with_extended(find_config(name))):
            for section, usual in _CLASSES.items():
                given = content.get(section) or {}
                kind = given.get("class_path", usual) if isinstance(given, dict) else given
                if kind not in (usual, f"roi_lightning.{usual}"):
                    chosen.add(section)
    return chosen


def _unknown(words: Sequence[str], known: set[str], chosen: set[str]) -> str | None:
    """The first option that the parser does not know; None where it is to judge itself."""
    for word in takewhile(lambda word: word != "--", words):
        given = word.partition("=")[0]
        name = given.rstrip("+").replace(".init_args", "")
        if name.endswith(".help") or re.match(r"-[a-z].", word):  # "-cFILE"
            return None
        # A word with a space is a value.
        if not word.startswith("--") or " " in word or name in known or name in SHORT:
            continue
        section, dot, _ = name.removeprefix("--").partition(".")
        if any(name.startswith(f"{option}.") for option in known - _SECTIONS) or (dot and section in chosen):
            continue
        if section not in _CLASSES and any(option.startswith(name) for option in known):
            return None  # an option that is cut short
        return given
    return None


def _meant(unknown: str, listed: set[str]) -> str:
    """The option that was perhaps meant, as a question; any section may have it."""
    named: dict[str, str] = {}
    for option in sorted(listed - SHORT.keys()):
        short = [f" (or {short})" for short, full in SHORT.items() if full == option]
        named[option.rpartition(".")[2].lstrip("-")] = "".join([option, *short])
    last = unknown.rpartition(".")[2].lstrip("-")
    near = get_close_matches({"learning_rate": "lr"}.get(last, last), named, 1, 0.65)
    return f"; did you mean {named[near[0]]}?" if near else ""
