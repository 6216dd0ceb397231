"""A base model as export needs it: every tensor under its name on disk, and the files around them.

A directory's tensors are taken as they lie; a GGUF file's are those of the model that transformers makes of
it, which then has to be written as a Hugging Face directory in the first place. A model that came without files
has those it holds.
"""

import json
import shutil
from pathlib import Path
from typing import Final, Protocol, cast, get_args

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from torch import Tensor
from transformers.modeling_utils import PreTrainedModel

from roi_lightning.errors import UserError
from roi_lightning.language_model import DType, load_config, load_language_model, load_tokenizer
from roi_lightning.sources import ModelSource, StoredTensors, read_json
from roi_lightning.sparse_linear import MaskedLinear

INDEX: Final = "model.safetensors.index.json"
SIDECAR: Final = "roi_sparsity.json"
COMPRESSION_KEYS: Final = ("quantization_config", "compression_config")
_COMPANIONS: Final = (
    "*.json",
    "*.jinja",
    "*.txt",
    "*.model",
    "*.tiktoken",
    "*.py",
    "LICENSE*",
    "NOTICE*",
    "USE_POLICY*",
    "additional_chat_templates/*.jinja",
)
_SHARD: Final = "5GB"


class BaseTensors(Protocol):
    """What both kinds of base offer.

    Attributes:
        files: The weight file of every tensor, by the tensor's name.
    """

    files: dict[str, str]

    @property
    def nbytes(self) -> int:
        """The size of all weight files."""

    def __getitem__(self, name: str) -> Tensor: ...

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of one tensor."""

    def write_weights(self, file_name: str, folder: Path) -> None:
        """Write one of the weight files, unmasked."""

    def write_companions(self, folder: Path) -> None:
        """Write every other file: configuration, tokenizer, licence, the index of the shards."""


class StoredBase(StoredTensors):
    """A directory with safetensors files, copied byte for byte.

    Raises:
        UserError: If the weights are quantised or compressed: zeros in packed numbers mean nothing.
    """

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        keys = compression_keys(directory)
        if keys:
            raise UserError(
                f"{str(directory)!r} has a {keys[0]} in its config.json: its weights are packed, and a mask "
                "of packed weights has no meaning; give the unquantised model"
            )

    @property
    def nbytes(self) -> int:
        """The size of all weight files."""
        return sum((self.directory / file).stat().st_size for file in set(self.files.values()))

    def companions(self) -> list[str]:
        """The files to copy, as paths relative to the directory; not the README, which describes the base."""
        found = {path for pattern in _COMPANIONS for path in self.directory.glob(pattern) if path.is_file()}
        names = {path.relative_to(self.directory).as_posix() for path in found}
        other_weights = {name for name in names if name.endswith(".index.json")} - {INDEX}
        return sorted(names - other_weights - {SIDECAR})

    def write_weights(self, file_name: str, folder: Path) -> None:
        """Copy one shard."""
        shutil.copyfile(self.directory / file_name, folder / file_name)

    def write_companions(self, folder: Path) -> None:
        """Copy everything that is no weight and no README."""
        for name in self.companions():
            (folder / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(self.directory / name, folder / name)


class LoadedBase:
    """The tensors of a model in memory (a GGUF file's as transformers dequantised them), tied duplicates left out."""

    def __init__(self, source: ModelSource, lm: PreTrainedModel) -> None:
        self._source, self._lm = source, lm
        seen: set[int] = set()
        # A model in training carries what is learned beside its weights.
        learned = {f"{n}.{x.learned}" for n, x in lm.named_modules() if isinstance(x, MaskedLinear)}
        self._tensors: dict[str, Tensor] = {}
        for name, tensor in lm.state_dict().items():
            if tensor.data_ptr() not in seen and name not in learned:
                self._tensors[name] = tensor
            seen.add(tensor.data_ptr())
        split = split_torch_state_dict_into_shards(self._tensors, max_shard_size=_SHARD)
        self._index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        self._sharded = split.is_sharded
        self.files = {name: split.tensor_to_filename[name] for name in self._tensors}

    @property
    def nbytes(self) -> int:
        """The size of all tensors."""
        return sum(tensor.nbytes for tensor in self._tensors.values())

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name].detach().cpu()

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of one tensor."""
        return tuple(self._tensors[name].shape)

    def write_weights(self, file_name: str, folder: Path) -> None:
        """Write the tensors of one shard."""
        tensors = {n: self[n].contiguous() for n, file in self.files.items() if file == file_name}
        save_tensors(tensors, folder / file_name, "pt")

    def write_companions(self, folder: Path) -> None:
        """Save the configurations and the tokenizer that transformers read out of the GGUF file."""
        config = load_config(self._source)
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        config.architectures = [type(self._lm).__name__]
        config.dtype = self._lm.dtype
        config.save_pretrained(folder)
        if self._lm.generation_config is not None:
            self._lm.generation_config.save_pretrained(folder)
        load_tokenizer(self._source.spec).save_pretrained(folder)
        if self._sharded:
            text = json.dumps(self._index, indent=2, sort_keys=True)
            (folder / INDEX).write_text(text)


def compression_keys(directory: Path) -> list[str]:
    """The keys of `config.json` by which engines take weights for quantised or compressed."""
    config = read_json(directory / "config.json")
    return [key for key in COMPRESSION_KEYS if key in config]


def open_base(source: ModelSource, dtype: str = "auto", lm: PreTrainedModel | None = None) -> BaseTensors:
    """Make a base model's tensors readable; those of a directory or a hub model are not loaded yet.

    Args:
        source: Where the model lies.
        dtype: What a GGUF model's weights are cast to; no other model is cast.
        lm: A model that is in memory only; the GGUF model, if already loaded (plain, in `dtype`); ignored for others.

    Raises:
        UserError: If the model can't be read, or its weights are quantised other than by GGUF.
    """
    if source.is_stored:
        return StoredBase(source.directory)
    if source.kind == "memory" and lm is not None:
        return LoadedBase(source, lm)
    if dtype not in get_args(DType):
        raise UserError(f"dtype {dtype!r} is none of {', '.join(get_args(DType))}")
    return LoadedBase(source, lm or load_language_model(source, cast(DType, dtype)))


def save_tensors(tensors: dict[str, Tensor], path: Path, form: str) -> None:
    """Write a safetensors file.

    Args:
        tensors: Contiguous.
        path: The file.
        form: What its header calls its format; transformers knows `pt`.
    """
    save_file(tensors, path, {"format": form})
    # safetensors makes its files readable by their owner alone; a checkpoint is there to be shared.
    path.chmod(0o644)


def bits(tensor: Tensor) -> Tensor:
    """The bytes of a tensor, uint8 [bytes], which compare even where numbers do not (NaN, −0.0)."""
    return tensor.contiguous().flatten().view(torch.uint8)


def same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are of one dtype and shape and equal in every bit."""
    alike = (one.dtype, one.shape) == (other.dtype, other.shape)
    return alike and torch.equal(bits(one), bits(other))
