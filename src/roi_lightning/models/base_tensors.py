"""The tensors of a base model, under their names on disk, and the files around them.

A directory's tensors are read as stored; a GGUF file's, and those of a model without files, are the loaded model's.
"""

import json
import shutil
from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final, cast, get_args

import torch
from huggingface_hub import parse_local_safetensors_file_metadata, split_torch_state_dict_into_shards
from safetensors.torch import save_file
from torch import Tensor
from transformers.modeling_utils import PreTrainedModel
from typing_extensions import override

from roi_lightning.errors import UserError
from roi_lightning.models.config import GGUF_DTYPE, DType, load_config, load_tokenizer
from roi_lightning.models.layers import expert_layers, named_weights
from roi_lightning.models.loading import load_language_model
from roi_lightning.models.source import SIDECAR, ModelSource
from roi_lightning.models.stored_tensors import INDEX, StoredTensors, own_file, read_json, tensor_sha256

_COMPANIONS: Final = (
    *("[!.]*.json", "[!.]*.jinja", "[!.]*.txt", "[!.]*.model", "[!.]*.tiktoken", "[!.]*.py"),
    *("LICENSE*", "NOTICE*", "USE_POLICY*", "additional_chat_templates/[!.]*.jinja"),
)
_FLOATS: Final = ("BF16", "F16", "F32", "F64")
_SHARD: Final = "5GB"


class BaseTensors(ABC):
    """What both kinds of base offer.

    Attributes:
        source: The model.
        files: The weight file of every tensor, by the tensor's name.
    """

    source: ModelSource
    files: dict[str, str]

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """The size of all weight files."""

    @abstractmethod
    def __getitem__(self, name: str) -> Tensor: ...

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of one tensor."""

    @abstractmethod
    def write_weights(self, file_name: str, folder: Path) -> None:
        """Write one of the weight files, unmasked."""

    @abstractmethod
    def write_companions(self, folder: Path) -> None:
        """Write every other file: configuration, tokenizer, licence, the index of the shards."""

    @cached_property
    def companions(self) -> list[str]:
        """The names of these."""
        with TemporaryDirectory() as folder:
            self.write_companions(Path(folder))
            return companions(Path(folder))

    def sha256(self, name: str) -> str:
        """The SHA-256 of one tensor (`tensor_sha256`), computed when first asked for."""
        if name not in self._hashes:
            self._hashes[name] = tensor_sha256(self[name])
        return self._hashes[name]

    @cached_property
    def _hashes(self) -> dict[str, str]:
        return {}


class StoredBase(StoredTensors, BaseTensors):
    """A directory with safetensors files, copied byte for byte.

    Raises:
        UserError: If the weights are quantised or compressed: zeros in packed weights mean nothing; see `companions`.
    """

    def __init__(self, source: ModelSource) -> None:
        super().__init__(source.directory)
        self.source = source
        keys = compression(self.directory) or self._packed()
        if keys:
            raise UserError(
                f"{str(self.directory)!r} has {keys[0]}: its weights are packed or elsewhere, and a mask of packed "
                "weights has no meaning; give the unquantised model"
            )
        self.companions = companions(self.directory)

    def _packed(self) -> list[str]:
        headers = (parse_local_safetensors_file_metadata(self.directory / x) for x in {*self.files.values()})
        weights = {k: x for header in headers for k, x in header.tensors.items() if k.endswith("weight")}
        return [f"{k} as {x.dtype}" for k, x in sorted(weights.items()) if x.dtype not in _FLOATS]

    @property
    @override
    def nbytes(self) -> int:
        return sum((self.directory / file).stat().st_size for file in set(self.files.values()))

    @override
    def write_weights(self, file_name: str, folder: Path) -> None:
        shutil.copyfile(self.directory / file_name, folder / file_name)

    @override
    def write_companions(self, folder: Path) -> None:
        for name in self.companions:
            (folder / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(self.directory / name, folder / name)


class LoadedBase(BaseTensors):
    """The tensors of a model in memory (a GGUF file's as transformers dequantised them).

    Tied duplicates are left out. Experts have their own tensors, as on disk.

    Args:
        source: Where the model was loaded from.
        lm: The model.
        dtype: Of its parameters as stored, if it may hold them in a wider one.
    """

    def __init__(self, source: ModelSource, lm: PreTrainedModel, dtype: torch.dtype | None = None) -> None:
        self.source, self._lm, self._dtype = source, lm, dtype
        blocks = expert_layers(lm).values()
        self._experts = {f"{name}.weight": layer for block in blocks for name, layer in block.items()}
        self._buffers = dict(lm.named_buffers()).keys()
        names = [*named_weights(lm), *(name for name in lm.state_dict() if name in self._buffers)]
        self._meta = {name: self._as_stored(name).to("meta") for name in names}
        split = split_torch_state_dict_into_shards(self._meta, max_shard_size=_SHARD)
        self._index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        self._sharded = split.is_sharded
        self.files = {name: split.tensor_to_filename[name] for name in self._meta}

    def _as_stored(self, name: str) -> Tensor:
        layer = self._experts.get(name)
        tensor = attrgetter(name)(self._lm).detach() if layer is None else layer.of(self._lm)
        return tensor.to(self._dtype) if self._dtype and name not in self._buffers else tensor

    @property
    @override
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._meta.values())

    @override
    def __getitem__(self, name: str) -> Tensor:
        # Asked for anew each time: a copy kept here would stay on the GPU that the model leaves.
        return self._as_stored(name).cpu()

    @override
    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._meta[name].shape)

    @override
    def write_weights(self, file_name: str, folder: Path) -> None:
        tensors = {n: self[n].contiguous() for n, file in self.files.items() if file == file_name}
        save_tensors(tensors, folder / file_name, "pt")

    @override
    def write_companions(self, folder: Path) -> None:
        config = load_config(self.source)
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        config.architectures = [type(self._lm).__name__]
        config.dtype = self._dtype or self._lm.dtype
        config.save_pretrained(folder)
        if self._lm.generation_config is not None:
            self._lm.generation_config.save_pretrained(folder)
        load_tokenizer(self.source.spec).save_pretrained(folder)
        if self._sharded:
            (folder / INDEX).write_text(json.dumps(self._index, indent=2, sort_keys=True))


def companions(directory: Path) -> list[str]:
    """The files that an export copies, as paths relative to a directory; not the README, which describes the base.

    Raises:
        UserError: If one is a link to somewhere else.
    """
    found = (path for pattern in _COMPANIONS for path in directory.glob(pattern) if path.is_file())
    names = {own_file(path, directory).relative_to(directory).as_posix() for path in found}
    other_weights = {name for name in names if name.endswith(".index.json")} - {INDEX}
    return sorted(names - other_weights - {SIDECAR})


def compression(directory: Path) -> list[str]:
    """The keys of `config.json` by which engines take weights for quantised or compressed, or read other files."""
    config = read_json(directory / "config.json")
    keys = "quantization_config", "compression_config", "transformers_weights"
    return [key for key in keys if config.get(key) is not None]


def open_base(
    source: ModelSource | BaseTensors, dtype: str = "auto", lm: PreTrainedModel | None = None
) -> BaseTensors:
    """Make a base model's tensors readable; those of a directory or a hub model are not loaded yet.

    Args:
        source: The model; tensors that are open already are given back.
        dtype: What a GGUF model's weights are cast to; no other model is cast.
        lm: A model that is in memory only; the GGUF model, if already loaded (plain, in `dtype` or a wider one);
            ignored for others.

    Raises:
        UserError: If the model can't be read, or its weights are quantised other than by GGUF.
    """
    if isinstance(source, BaseTensors):
        return source
    if source.is_stored:
        return StoredBase(source)
    if source.kind == "memory" and lm is not None:
        return LoadedBase(source, lm)
    if dtype not in get_args(DType):
        raise UserError(f"dtype {dtype!r} is none of {', '.join(get_args(DType))}")
    stored = getattr(torch, GGUF_DTYPE if dtype == "auto" else dtype)
    return LoadedBase(source, lm or load_language_model(source, cast(DType, dtype)), stored)


def save_tensors(tensors: dict[str, Tensor], path: Path, form: str) -> None:
    """Write a safetensors file.

    Args:
        tensors: Contiguous.
        path: The file.
        form: What its header calls its format; transformers knows `pt`.
    """
    path.touch()
    mode = path.stat().st_mode
    save_file(tensors, path, {"format": form})
    path.chmod(mode)  # as the umask has it; safetensors makes its files readable by their owner alone


def overwrite_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Replace the values of some tensors in a safetensors file; every other byte stays.

    Args:
        path: The file, with tensors of the same names, shapes and dtypes.
        tensors: On the CPU.

    Raises:
        UserError: If a tensor takes another number of bytes.
    """
    with path.open("r+b") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
        for name, tensor in tensors.items():
            start, end = header[name]["data_offsets"]
            values = bits(tensor)
            if values.numel() != end - start:
                raise UserError(f"{name!r} takes {end - start} bytes on disk, not {values.numel()}")
            file.seek(8 + length + start)
            file.write(values.numpy().data)


def bits(tensor: Tensor) -> Tensor:
    """The bytes of a tensor, uint8 [bytes], which compare equal even for NaN, and tell −0.0 from 0.0."""
    return tensor.contiguous().flatten().view(torch.uint8)


def same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are of one dtype and shape and equal in every bit."""
    alike = (one.dtype, one.shape) == (other.dtype, other.shape)
    return alike and torch.equal(bits(one), bits(other))
