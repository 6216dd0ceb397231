"""A model's configuration and tokenizer, and the dtype that its weights are held in; no weight is read."""

import re
from copy import deepcopy
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np
import torch
from numpy.typing import ArrayLike
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig
from transformers.modeling_utils import PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from roi_lightning.errors import UserError
from roi_lightning.models.source import ModelSource, resolve_model, unreadable

if TYPE_CHECKING:
    NamedModel = str | PreTrainedModel
    NamedTokenizer = str | PreTrainedTokenizerBase
else:
    NamedModel = NamedTokenizer = str  # all that a command line gives
DType = Literal["auto", "float32", "bfloat16", "float16"]
# What a GGUF file's weights are cast to unless told otherwise, and written as.
GGUF_DTYPE: Final = "bfloat16"
# The entry of a GGUF file, key, type, length and value, by which llama.cpp splits digits off before the rest. It
# stands before the vocabulary, with which gguf's own reader takes seconds.
_DIGITS_FIRST: Final = re.compile(
    rb"tokenizer\.ggml\.pre\x08\0{3}.\0{7}(smollm|starcoder|refact|command-r|codeshell|exaone|minerva-7b).\0{7}",
    re.DOTALL,
)
# Any of these will do; CPUs of other kinds list none of them.
_INSTRUCTIONS: Final = {
    torch.bfloat16: ("amx_bf16", "avx512_bf16", "avx10_2", "bf16", "sve_bf16"),
    torch.float16: ("amx_fp16", "avx512_fp16", "avx10_2", "fp16_arith"),
}


def compute_dtype(stored: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype in which frozen weights are held: fp32 on a CPU that multiplies the stored one more slowly.

    Args:
        stored: The weights' own.
        device: Where they are multiplied.
    """
    return torch.float32 if device.type == "cpu" and _is_slow(stored) else stored


@cache
def _is_slow(dtype: torch.dtype) -> bool:
    """Whether this CPU is known to multiply matrices of a dtype more slowly than of fp32.

    Intel's CPUs with avx512_fp16 have AMX. If a virtual machine hides it, avx512_bf16 has half of fp32's speed there.
    """
    found = native_instructions(dtype)
    return found == [] or (found == ["avx512_bf16"] and native_instructions(torch.float16) == ["avx512_fp16"])


def native_instructions(dtype: torch.dtype) -> list[str] | None:
    """This CPU's instructions for matrix products of a dtype, by torch's names; None where torch can't tell."""
    able = getattr(torch.cpu, "get_capabilities", dict[str, Any])()  # older releases can't tell
    listed = [name for name in _INSTRUCTIONS.get(dtype, ()) if name in able]
    return [name for name in listed if able[name]] if listed else None


def load_config(source: ModelSource, trust_remote_code: bool = False) -> PreTrainedConfig:
    """Read a model's configuration; no weight is touched.

    Raises:
        UserError: If transformers can't read it.
    """
    # A GGUF file tells its configuration after its whole vocabulary, which takes seconds.
    read = _read_config_once if source.kind == "gguf" else _read_config
    return deepcopy(read(source, trust_remote_code))


def _read_config(source: ModelSource, trust_remote_code: bool) -> PreTrainedConfig:
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(
            **source.pretrained, trust_remote_code=trust_remote_code
        )
        return config
    except Exception as error:
        raise unreadable(source, error) from error


_read_config_once: Final = lru_cache(maxsize=4)(_read_config)


def max_positions(config: PreTrainedConfig) -> int | None:
    """The longest sequence a model was made for, in tokens; None where its configuration names no limit."""
    text = config.get_text_config()
    found = (getattr(text, key, None) for key in ("max_position_embeddings", "n_positions", "n_ctx"))
    return next((int(value) for value in found if value is not None), None)


def check_embedded(
    ids: ArrayLike, tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig | None
) -> None:
    """Refuse tokens, by number or its complement, for which the model of a configuration, if known, has no embedding.

    Raises:
        UserError: Naming the highest of them, and both sizes.
    """
    found, rows = np.asarray(ids), getattr(config and config.get_text_config(), "vocab_size", None)
    highest = int(max(found.max(initial=0), ~found.min(initial=0)))
    if rows is not None and highest >= rows:
        raise UserError(
            f"the text holds token {tokenizer.convert_ids_to_tokens(highest)!r}, number {highest}: the tokenizer has "
            f"{len(tokenizer)} tokens and the model embeds {rows}; leave such text out, or give a model that was "
            "resized for its tokenizer"
        )


def load_tokenizer(
    spec: str, revision: str | None = None, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """The tokenizer that belongs to a model.

    Raises:
        UserError: If the model can't be found or has no tokenizer.
    """
    source = resolve_model(spec, revision, compressed=True)
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            **source.pretrained, trust_remote_code=trust_remote_code
        )
    except Exception as error:
        raise unreadable(source, error) from error
    if source.kind == "gguf" and source.path is not None:
        _split_digits(tokenizer, source.path)
    if len(tokenizer) <= len(set(tokenizer.all_special_tokens)):
        # What transformers makes of a directory that has lost its tokenizer.json.
        raise UserError(f"model {source.spec!r} has no tokenizer that knows any text; fetch it again")
    return tokenizer


def _split_digits(tokenizer: Any, file: Path) -> None:
    """Make each digit a piece of its own where a GGUF file says so; transformers leaves this step out."""
    with file.open("rb") as stream:
        said = _DIGITS_FIRST.search(stream.read(1 << 20))
    backend = tokenizer.backend_tokenizer
    if said and isinstance(backend.pre_tokenizer, ByteLevel):
        backend.pre_tokenizer = Sequence([Digits(individual_digits=True), backend.pre_tokenizer])
