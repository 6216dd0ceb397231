"""The tokenizer of a model, as GGUF files hold one."""

import json
from collections.abc import Mapping
from typing import Any, Final

from gguf import GGUFWriter, TokenType
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from roi_lightning.errors import UserError

# How text is cut before bytes are merged, by llama.cpp's names.
_LLAMA3: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_SPLITS: Final = {
    ("ByteLevel",): "gpt-2",
    ("Digits", "ByteLevel"): "smollm",
    (_LLAMA3,): "llama-bpe",
    (_LLAMA3.replace("{1,3}", ""),): "qwen2",
}
_SPACE: Final = "▁"
_IDS: Final = {
    "bos": "bos_token_id",
    "eos": "eos_token_id",
    "unknown": "unk_token_id",
    "padding": "pad_token_id",
}


def add_tokenizer(writer: GGUFWriter, tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> None:
    """Write a model's vocabulary, merges, special tokens and chat template.

    Args:
        writer: Of the file, whose metadata is not yet written.
        tokenizer: A fast one.
        vocab_size: Rows of the model's embeddings; those that no token has are filled up.

    Raises:
        UserError: If llama.cpp cuts text in another way, or has no such tokenizer.
    """
    if not tokenizer.is_fast:
        raise UserError(
            f"{type(tokenizer).__name__} has no tokenizer.json; its tokens can't be written as GGUF"
        )
    described = json.loads(tokenizer.backend_tokenizer.to_str())
    model = described["model"]
    if model["type"] != "BPE":
        raise UserError(f"a tokenizer of the type {model['type']} is not written as GGUF; only BPE is")
    tokens, types = _tokens(described, vocab_size)
    if model["byte_fallback"]:
        writer.add_tokenizer_model("llama")
        writer.add_token_scores(_scores(model, tokens))
        writer.add_add_space_prefix(_prepends_space(described))
    else:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(_split(described))
        writer.add_token_merges([" ".join(pair) for pair in _pairs(model)])
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    _add_special(writer, tokenizer)


def _tokens(described: Mapping[str, Any], size: int) -> tuple[list[str], list[TokenType]]:
    """The text and kind of every token, in order."""
    model = described["model"]
    tokens, types = [f"[PAD{i}]" for i in range(size)], [TokenType.UNUSED] * size
    named = dict(model["vocab"]) | {each["content"]: each["id"] for each in described["added_tokens"]}
    if max(named.values()) >= size:
        raise UserError(f"the tokenizer has {max(named.values()) + 1} tokens and the model embeds {size}")
    for text, i in named.items():
        is_byte = model["byte_fallback"] and len(text) == 6 and text.startswith("<0x")
        tokens[i], types[i] = text, TokenType.BYTE if is_byte else TokenType.NORMAL
    for each in described["added_tokens"]:
        types[each["id"]] = TokenType.CONTROL if each["special"] else TokenType.USER_DEFINED
    if model["byte_fallback"] and model["unk_token"] is not None:
        types[named[model["unk_token"]]] = TokenType.UNKNOWN
    return tokens, types


def _scores(model: Mapping[str, Any], tokens: list[str]) -> list[float]:
    """llama.cpp merges the pair whose result has the highest score: the one that is merged first has it."""
    rank: dict[str, int] = {}
    for i, pair in enumerate(_pairs(model)):
        rank.setdefault("".join(pair), i)
    return [-float(rank.get(text, len(rank))) for text in tokens]


def _pairs(model: Mapping[str, Any]) -> list[list[str]]:
    return [pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"]]


def _split(described: Mapping[str, Any]) -> str:
    """llama.cpp's name of how text is cut into words."""
    cutting = described["pre_tokenizer"] or {}
    steps = cutting.get("pretokenizers", [cutting])
    key = tuple(
        step["pattern"].get("Regex", "") if step.get("type") == "Split" else str(step.get("type"))
        for step in steps
        if not (step.get("type") == "ByteLevel" and not step["use_regex"])
    )
    prefixed = any(step.get("add_prefix_space") for step in steps)
    digits = [step for step in steps if step.get("type") == "Digits" and not step["individual_digits"]]
    if key not in _SPLITS or prefixed or digits:
        raise UserError(
            f"the tokenizer cuts text in a way that has no name in llama.cpp here ({', '.join(key) or 'none'}); use "
            "llama.cpp's own convert_hf_to_gguf.py on the directory"
        )
    return _SPLITS[key]


def _prepends_space(described: Mapping[str, Any]) -> bool:
    """Whether a space goes before the first word."""
    said = json.dumps([described["normalizer"], described["pre_tokenizer"]], ensure_ascii=False)
    scheme = '"prepend_scheme": "'
    return f'"prepend": "{_SPACE}"' in said or f"{scheme}first" in said or f"{scheme}always" in said


def _add_special(writer: GGUFWriter, tokenizer: PreTrainedTokenizerBase) -> None:
    for kind, attribute in _IDS.items():
        token = getattr(tokenizer, attribute)
        if token is not None:
            writer.add_uint32(f"tokenizer.ggml.{kind}_token_id", token)
    ids = tokenizer("a").input_ids
    writer.add_add_bos_token(bool(tokenizer.bos_token_id is not None and ids[0] == tokenizer.bos_token_id))
    writer.add_add_eos_token(bool(tokenizer.eos_token_id is not None and ids[-1] == tokenizer.eos_token_id))
    template = tokenizer.chat_template
    if isinstance(template, str):
        writer.add_chat_template(template)
