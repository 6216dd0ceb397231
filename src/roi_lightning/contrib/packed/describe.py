"""Describe a packed directory: its model card, and the bytes that packing saves."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path, PurePath
from typing import Any, Final

from huggingface_hub import ModelCardData

from roi_lightning.contrib.packed.tensors import INT8, STORED, PackedTensors
from roi_lightning.models.base_tensors import StoredBase

_TEXT = """Of every masked linear layer only the kept weights are here (`weight`), and for each of them a two-bit
index (`weight_indices`): which input of its group it belongs to. transformers loads it without ever holding a dense
copy, once the package `roi-lightning` has taught it the format; without that it ends with an error, as inference
engines do:

```python
import roi_lightning.contrib.packed  # registers the format
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("PATH")
tokenizer = AutoTokenizer.from_pretrained("PATH")
```

COMPUTES `roi_lightning.contrib.packed.from_packed("PATH")` hashes every file before it loads them, this one
included, and refuses a directory in which one has changed. `roi-lightning verify PATH --base BASE` compares the kept
weights with the base model's. What the base model's licence asks for applies here too.
"""
_COMPUTES: Final = {
    STORED: "It computes what the dense directory computes that it was packed from.",
    INT8: """The kept weights are int8, and each row of outputs has a scale for its own (`weight_scales`, fp32): its
largest absolute weight / 127. A kept weight differs by at most half of that from the one in the dense directory that
this was packed from; pruned ones are exactly zero.""",
}


def packed_card(description: Mapping[str, Any]) -> str:
    """Write the model card.

    Args:
        description: The sidecar's content.

    Returns:
        Markdown with a YAML front matter.
    """
    base, pattern = description["base"], description["pattern"]
    name = base["spec"] if base["revision"] else PurePath(base["spec"]).name or base["spec"]
    data = ModelCardData(
        base_model=base["spec"] if base["revision"] else None,  # only hub models have one
        library_name="roi-lightning",
        pipeline_tag="text-generation",
        tags=["sparsity", "pruning", pattern, "semi-structured", "roi-lightning"],
    )
    weights = description["weights"]
    title = f"{name}, {pattern} sparse, packed{' in int8' if weights == INT8 else ''}"
    return f"---\n{data.to_yaml()}\n---\n\n# {title}\n\n{_TEXT.replace('COMPUTES', _COMPUTES[weights])}"


@dataclass(frozen=True)
class PackedSizes:
    """What packing saves.

    Attributes:
        layers: How many tensors were packed.
        linears: Their bytes before.
        packed: Their bytes after.
        before: Bytes of all files of the directory that was packed.
        after: Bytes of all files of the one that was written.
    """

    layers: int
    linears: int
    packed: int
    before: int
    after: int

    @property
    def ratio(self) -> float:
        """What remains of the bytes of the packed tensors."""
        return self.packed / self.linears

    def to_json(self) -> dict[str, Any]:
        """The sizes as JSON can hold them."""
        return asdict(self) | {"ratio": self.ratio}


def packed_sizes(base: StoredBase, packed: PackedTensors) -> PackedSizes:
    """The sizes of two directories.

    Args:
        base: The one that was packed.
        packed: What was made of it.
    """
    return PackedSizes(
        layers=len(packed.layers),
        linears=sum(base[name].nbytes for name in packed.layers),
        packed=sum(packed.packed(name).nbytes for name in packed.layers),
        before=_directory_bytes(base.directory),
        after=_directory_bytes(packed.directory),
    )


def _directory_bytes(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
