"""The sidecar of an exported directory: what was done to the weights, and the hash of every other file.

It has one valid spelling, the one that `render` gives, so that any changed byte of it is noticed. Names and
commands in it and in the card are without local folders, passwords and tokens.
"""

import hashlib
import importlib.metadata
import json
import math
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any, Final

from roi_lightning.errors import UserError
from roi_lightning.masks.mask_set import MASK_FILE, MaskSet
from roi_lightning.masks.pattern import NMPattern
from roi_lightning.models.base_tensors import BaseTensors
from roi_lightning.models.source import SIDECAR
from roi_lightning.models.stored_tensors import StoredTensors
from roi_lightning.utils.progress import progress

EXPORTED: Final = "roi_lightning.sparsity"
# The method of exports whose kept weights were trained on.
RECOVERED: Final = "recovered"
# At the end of a learner's, where it trained the weights along with the mask.
WITH_WEIGHTS: Final = "+weights"
_DOWNLOADED: Final = ".cache/huggingface/"


def describe(masks: MaskSet, tensors: BaseTensors | StoredTensors) -> dict[str, Any]:
    """What the sidecar says of the masks that were applied.

    Args:
        masks: The masks.
        tensors: All of the model's, masked or not; only their shapes count.
    """
    parameters = sum(math.prod(tensors.shape(name)) for name in tensors.files)
    base = masks.base
    return {
        "pattern": str(masks.pattern),
        **_amounts(masks),
        "base": {"spec": base.spec, "revision": base.revision, "dtype": base.dtype},
        "parameters": parameters,
        "zero_fraction": (masks.total - masks.kept) / parameters,
        "updated": list(masks.updated),
        "layers": {name: _layer(masks, name) for name in masks.layers},
        "mask_file": MASK_FILE,
    }


def _amounts(masks: MaskSet) -> dict[str, Any]:
    """N and M; of mixed patterns the weights that stay, of how many, and those of layers left dense."""
    if isinstance(masks.pattern, NMPattern):
        return {"n": masks.pattern.n, "m": masks.pattern.m}
    dense = sum(masks.dense.values())
    counts = {"kept": masks.kept + dense, "prunable": masks.total + dense, "dense": masks.dense}
    return {"mixed_patterns": counts}


def _layer(masks: MaskSet, name: str) -> dict[str, Any]:
    layer = masks.layers[name]
    own = {"pattern": str(masks.pattern.of(name))} if masks.is_mixed else {}
    return {"density": layer.kept / layer.total} | own


def command_line() -> list[str] | None:
    """The arguments of this process without passwords and tokens; None if it runs no command of this project."""
    program, *words = sys.argv
    if Path(program).stem != "roi-lightning" and Path(program).parts[-2:] != ("roi_lightning", "__main__.py"):
        return None
    options = [word if word.startswith("--") else "" for word in ["", *words]]
    return [without_secrets(option, word) for option, word in zip(options, words, strict=False)]


def heading(form: str, version: int = 1) -> dict[str, Any]:
    """How every sidecar begins: what kind of directory it belongs to, and who wrote it."""
    return {
        "format": form,
        "version": version,
        "package_version": importlib.metadata.version("roi-lightning"),
    }


def write_sidecar(directory: Path, description: Mapping[str, Any]) -> None:
    """Hash every file of a directory and write the sidecar, checksum included.

    Raises:
        OSError: If a file can't be read or written.
    """
    content = dict(description) | {
        "files": {name: file_sha256(directory / name) for name in written_files(directory)}
    }
    content["checksum"] = _checksum(content)
    (directory / SIDECAR).write_text(render(content), encoding="utf-8")


def read_sidecar(directory: Path, form: str | None = EXPORTED, version: int = 1) -> dict[str, Any]:
    """Read a directory's sidecar and check that it is intact.

    Args:
        directory: Any.
        form: The kind of directory that is wanted; None for any.
        version: Of the format.

    Raises:
        UserError: If there is none, it is not as `write_sidecar` wrote it, or of another kind.
    """
    try:
        text = (directory / SIDECAR).read_bytes()
        content: dict[str, Any] = json.loads(text)
        written = (content["format"], content["version"])
        intact = content["checksum"] == _checksum(content) and text == render(content).encode()
    except OSError as error:
        raise UserError(f"{SIDECAR} can't be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{SIDECAR} is not one that roi_lightning wrote") from error
    if form is not None and written != (form, version):
        raise UserError(f"{SIDECAR} has the unknown format {written}")
    if not intact:
        raise UserError(f"{SIDECAR} does not match its own checksum")
    return content


def written_files(directory: Path) -> list[str]:
    """Every file but the sidecar and what `hf download` notes, as sorted paths relative to the directory."""
    found = (path for path in directory.rglob("*") if not path.is_dir() or path.is_symlink())
    names = (path.relative_to(directory).as_posix() for path in found)
    return sorted(name for name in names if name != SIDECAR and not name.startswith(_DOWNLOADED))


def require_intact(directory: Path, hashes: Mapping[str, str | None]) -> None:
    """Refuse a directory with files that are missing or not as they were written, by their SHA-256.

    Raises:
        UserError: Naming the first such file.
    """
    for name, digest in progress(list(hashes.items()), "hashing files"):
        path = directory / name
        if not path.is_file():
            raise UserError(f"{str(path)!r} is missing; fetch or write the directory again")
        if file_sha256(path) != digest:
            raise UserError(f"{str(path)!r} has changed since it was written; fetch or write it again")


def file_sha256(path: Path) -> str:
    """SHA-256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def render(content: Mapping[str, Any]) -> str:
    """The one spelling of a sidecar."""
    return json.dumps(content, indent=2) + "\n"


def plain(value: object) -> Any:
    """A value as JSON gives it back; what JSON lacks (NaN, infinity, paths) becomes text."""
    return json.loads(json.dumps(value, default=str), parse_constant=str)


def _checksum(content: Mapping[str, Any]) -> str:
    rest = {key: value for key, value in content.items() if key != "checksum"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


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
