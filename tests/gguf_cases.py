"""What tests of GGUF files share: models, their exports, texts, a tokenizer of another kind."""

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from cli_helpers import run
from tiny_models import tiny_gemma2, tiny_gemma3, tiny_llama, tiny_mistral, tiny_qwen2, tiny_qwen3

SIX = ["sliding_attention"] * 5 + ["full_attention"]
ARCHITECTURES = {
    "llama": (tiny_llama, {}),
    "mistral": (tiny_mistral, {"sliding_window": None}),
    "qwen2": (tiny_qwen2, {}),
    "qwen3": (tiny_qwen3, {"head_dim": 128}),  # transformers takes that for granted
    "gemma2": (tiny_gemma2, {"query_pre_attn_scalar": 16}),
    "gemma3": (tiny_gemma3, {"num_hidden_layers": 6, "layer_types": SIX}),
}
TEXTS = ["ab 123 ab\n\nab", " leading", "1234", "ça va — 東京 🙂", "a<|end|>b"]


def pruned(base: Path, out: Path, *more: str) -> Path:
    """A magnitude export of a model."""
    assert run("prune", base, "--method", "magnitude", *more, "--out", out) == 0
    return out


def sentencepiece(folder: Path) -> None:
    """A tokenizer of the kind that Llama 2 and Gemma have: no bytes but as a fallback, spaces as ▁."""
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("▁", "hell"), ("▁hell", "o")]
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(200))]
    pieces += ["h", "e", "l", "o", "▁", "w", *("".join(pair) for pair in merges)]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    model = models.BPE(vocabulary, merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.ByteFallback()
    special = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
