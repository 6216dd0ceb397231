"""Exports under random masks, what is in a written directory, and what a careless tool might do to it."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from helpers.tiny_models import random_masks
from roi_lightning.export import VerifyReport, write_export
from roi_lightning.export.sidecar import read_sidecar, write_sidecar
from roi_lightning.masks.mask_set import MaskSet
from roi_lightning.models.source import ModelSource, resolve_model


def export_of(
    model: Path, pattern: str = "2:4", dtype: str = "auto", **options: Any
) -> tuple[ModelSource, MaskSet, Path]:
    """A model, random masks for it, and its export under them beside it, as `out`."""
    source = resolve_model(str(model))
    masks = random_masks(source, pattern, dtype=dtype)
    return source, masks, write_export(source, masks, model.parent / "out", **options)


def weight_files(directory: Path) -> list[Path]:
    return sorted(directory.glob("model*.safetensors"))


def tensors_of(directory: Path) -> dict[str, Tensor]:
    """The stored tensors of all files, by name."""
    return {name: x for file in weight_files(directory) for name, x in load_file(file).items()}


def change(directory: Path, name: str, edit: Callable[[Tensor], Tensor]) -> None:
    """Put what a function makes of a tensor in its place."""
    file = next(file for file in weight_files(directory) if name in load_file(file))
    held = {key: x.clone() for key, x in load_file(file).items()}
    save_file(held | {name: edit(held[name])}, file, {"format": "pt"})


def reseal(directory: Path, **other: Any) -> None:
    """Make the sidecar fit the files again; some of what it says may become something other."""
    content = {k: x for k, x in read_sidecar(directory, None).items() if k not in ("files", "checksum")}
    write_sidecar(directory, content | other)


# What `add` knows. Without the base nobody can tell that a chat template is not the model's own.
TEMPLATE = "chat_template.jinja"
SHARDED = "a whole file", "a tensor twice", "a tensor in no index"
ADDITIONS = *SHARDED, "other weights", "a link", "adapter_config.json", "pytorch_model.bin", TEMPLATE


def add(directory: Path, what: str) -> None:
    """Put something into a directory that might be read instead of its own weights, which stay as they are."""
    first, *_, last = weight_files(directory) * 2
    other = {name: x + 1 for name, x in tensors_of(directory).items()}
    if what == "a whole file":
        save_file(other, directory / "model.safetensors")
    elif what in SHARDED:
        name = next(iter(load_file(last))) if what == "a tensor twice" else "one_more"
        save_file(load_file(first) | {name: other["model.norm.weight"]}, first)
    elif what == "other weights":
        save_file(other, directory / "other.safetensors")
        config = json.loads((directory / "config.json").read_text())
        config["transformers_weights"] = "other.safetensors"
        (directory / "config.json").write_text(json.dumps(config))
    elif what == "a link":
        (directory / "generation_config.json").replace(directory.parent / "outside")
        (directory / "generation_config.json").symlink_to(directory.parent / "outside")
    else:
        (directory / what).write_text("{}")


def failed(report: VerifyReport) -> set[str]:
    """The names of the checks that do not hold."""
    return {check.name for check in report.failures}


@contextmanager
def flipped_bit(file: Path, number: int) -> Iterator[None]:
    """One bit of a file the other way round while the block runs; where it lies, as nothing is faster."""

    def flip() -> None:
        with file.open("r+b") as stream:
            stream.seek(number // 8)
            (byte,) = stream.read(1)
            stream.seek(number // 8)
            stream.write(bytes([byte ^ 1 << number % 8]))

    flip()
    yield
    flip()
