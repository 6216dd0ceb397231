"""Names without the folders of this machine, for whatever others are to read."""

import os
import re
from pathlib import PurePath
from typing import Any, Final

from roi_lightning.data.corpora import FORMATS
from roi_lightning.data.local_files import OPENERS

_SUFFIXES: Final = {*FORMATS, *OPENERS, ".gguf", ".safetensors", ".yaml", ".ckpt"}
_WORD: Final = re.compile(r"[^\s'\"{}\[\]()=,]+")


def public_name(text: str) -> str:
    """The last part of a path, or of each in a list with commas; hub ids and all that is no path stay.

    `/home/me/texts/*.txt, owner/name` becomes `*.txt, owner/name`, `gguf:../m.gguf` becomes `m.gguf`.
    """
    parts = text.split(", ")
    return ", ".join(PurePath(x).name if _is_path(x) else _WORD.sub(_public_word, x) for x in parts)


def public_values(value: Any) -> Any:
    """Lists and mappings with `public_name` of every text in them."""
    if isinstance(value, dict):
        return {key: public_values(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [public_values(inner) for inner in value]
    return public_name(value) if isinstance(value, str) else value


def _public_word(match: re.Match[str]) -> str:
    word = match[0]
    return PurePath(word).name if _is_path(word) else word


def _is_path(text: str) -> bool:
    if "/" not in text or "://" in text or any(mark in text for mark in "{}\n"):
        return False
    marked = text.startswith(("/", "~", ".", "gguf:")) or "*" in text
    return marked or PurePath(text).suffix in _SUFFIXES or os.path.exists(text)  # noqa: PTH110 - no path at all is no error here
