"""Names and commands as a card or a sidecar may show them: without local folders, passwords and tokens."""

import os
import re
from pathlib import PurePath
from typing import Final

_SUFFIXES: Final = {
    *(".txt", ".json", ".jsonl", ".parquet", ".gz", ".zst", ".xz", ".bz2"),
    *(".gguf", ".safetensors", ".yaml", ".ckpt"),
}
_SECRET: Final = r"(?:\b|[._-])(?:token|key|secret|password)"
_HIDDEN: Final = "REDACTED"
_WORD: Final = re.compile(r"[^\s'\"{}\[\]()=,]+")


def public_name(text: str) -> str:
    """The last part of a path, or of each in a list with commas; hub ids and all that is no path stay.

    `/home/me/texts/*.txt, owner/name` becomes `*.txt, owner/name`, `gguf:../m.gguf` becomes `m.gguf`.
    """
    parts = text.split(", ")
    return ", ".join(PurePath(x).name if _is_path(x) else _WORD.sub(_public_word, x) for x in parts)


def without_secrets(name: str, text: str) -> str:
    """A text without the passwords and tokens in it.

    Args:
        name: The option or the key that the text is the value of.
        text: May hold options or keys with values itself.
    """
    if re.search(f"{_SECRET}$", name):
        return _HIDDEN
    named = re.sub(rf"""({_SECRET}["']?\s*[=:]\s*)[^\s,}}]+""", rf"\1{_HIDDEN}", text)
    return re.sub(r"\bhf_\w{20,}", _HIDDEN, named)


def _public_word(match: re.Match[str]) -> str:
    word = match[0]
    return PurePath(word).name if _is_path(word) else word


def _is_path(text: str) -> bool:
    if "/" not in text or "://" in text or any(mark in text for mark in "{}\n"):
        return False
    marked = text.startswith(("/", "~", ".", "gguf:")) or "*" in text
    return marked or PurePath(text).suffix in _SUFFIXES or os.path.exists(text)  # noqa: PTH110 - no path at all is no error here
