"""Builders of tiny random models on disk: configuration, safetensors, tokenizer."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from roi_lightning.masks.layer_mask import LayerMask
from roi_lightning.masks.mask_set import MaskSet
from roi_lightning.masks.pattern import NMPattern
from roi_lightning.models.base_tensors import open_base
from roi_lightning.models.fingerprint import base_model
from roi_lightning.models.source import ModelSource

EOS = "<|end|>"
VOCABULARY = [*sorted(pre_tokenizers.ByteLevel.alphabet()), EOS, "ab"]
VOCAB_SIZE = 264
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 256,
    "eos_token_id": 256,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


def tiny_qwen2(directory: Path, seed: int = 0, **overrides: Any) -> Path:
    """Biases on q, k and v; head tied to the embeddings; bfloat16."""
    sizes = _SIZES | {"tie_word_embeddings": True}
    return _save("qwen2", sizes, directory, seed, {"dtype": torch.bfloat16} | overrides)


def tiny_llama(directory: Path, seed: int = 0, **overrides: Any) -> Path:
    """No biases; a head of its own; float32."""
    return _save("llama", _SIZES | {"tie_word_embeddings": False}, directory, seed, overrides)


def tiny_gpt2(directory: Path, seed: int = 0, prefix: bool = True, **overrides: Any) -> Path:
    """`Conv1D` layers ([in, out]); without `prefix` the tensors on disk lack `transformer.`; float32."""
    sizes = {"vocab_size": VOCAB_SIZE, "n_embd": 64, "n_inner": 128, "n_layer": 2, "n_head": 4}
    sizes |= {"n_positions": 128, "bos_token_id": 256, "eos_token_id": 256}
    _save("gpt2", sizes, directory, seed, overrides)
    if not prefix:
        file = directory / "model.safetensors"
        tensors = {name.removeprefix("transformer."): x.clone() for name, x in load_file(file).items()}
        save_file(tensors, file, {"format": "pt"})
    return directory


def tiny_gemma2(directory: Path, seed: int = 0, **overrides: Any) -> Path:
    """Attends over the whole window in every second block only: the blocks need different masks; float32."""
    sizes = _SIZES | {"num_hidden_layers": 4, "head_dim": 16, "sliding_window": 4}
    return _save("gemma2", sizes | {"attn_implementation": "eager"}, directory, seed, overrides)


def tiny_gemma3(directory: Path, seed: int = 0, **overrides: Any) -> Path:
    """Norms on queries and keys; one block that sees the whole window, one that does not; head tied; float32."""
    sizes = _SIZES | {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 4}
    sizes |= {"layer_types": ["sliding_attention", "full_attention"]}
    return _save("gemma3_text", sizes, directory, seed, overrides)


def tiny_qwen3(directory: Path, seed: int = 0, **overrides: Any) -> Path:
    """Norms on queries and keys, no biases; a head of its own; float32."""
    return _save("qwen3", _SIZES | {"head_dim": 16}, directory, seed, overrides)


def tiny_mistral(directory: Path, seed: int = 0, **overrides: Any) -> Path:
    """A sliding window in every block; float32."""
    return _save("mistral", _SIZES | {"sliding_window": 8}, directory, seed, overrides)


def tiny_phi3(directory: Path, seed: int = 0, **overrides: Any) -> Path:
    """One linear layer for queries, keys and values, one for gate and up; float32."""
    return _save("phi3", _SIZES | {"pad_token_id": 256}, directory, seed, overrides)


def tiny_opt(directory: Path, seed: int = 0, **overrides: Any) -> Path:
    """Biases everywhere, learned positions, head tied; float32."""
    sizes = _SIZES | {"ffn_dim": 128, "word_embed_proj_dim": 64, "pad_token_id": 1}
    return _save("opt", sizes, directory, seed, overrides)


def tiny_mixtral(directory: Path, seed: int = 0, **overrides: Any) -> Path:
    """Four experts, two for each token; other names on disk than in memory; float32."""
    return _save("mixtral", _SIZES | {"num_local_experts": 4}, directory, seed, overrides)


def tiny_qwen3_moe(directory: Path, seed: int = 0, **overrides: Any) -> Path:
    """Four experts, two for each token; float32."""
    return _save("qwen3_moe", _SIZES | _EXPERTS | {"head_dim": 16}, directory, seed, overrides)


def tiny_qwen2_moe(directory: Path, seed: int = 0, **overrides: Any) -> Path:
    """Four experts, and one for all tokens behind a gate that is a linear layer; float32."""
    sizes = _SIZES | _EXPERTS | {"shared_expert_intermediate_size": 64}
    return _save("qwen2_moe", sizes, directory, seed, overrides)


def tiny_gpt_oss(directory: Path, seed: int = 0, **overrides: Any) -> Path:
    """Experts that are stacked on disk too, transposed, with biases and a gate of their own; float32."""
    sizes = _SIZES | {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "pad_token_id": 256}
    return _save("gpt_oss", sizes, directory, seed, overrides)


def tiny_mamba(directory: Path, seed: int = 0, **overrides: Any) -> Path:
    """A mixer that multiplies by another module's weight; float32."""
    sizes = {"vocab_size": VOCAB_SIZE, "hidden_size": 32, "state_size": 8, "num_hidden_layers": 2}
    return _save("mamba", sizes | {"time_step_rank": 8}, directory, seed, overrides)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, and an end token."""
    core = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(VOCABULARY)}, merges=[("a", "b")]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token=EOS, bos_token=EOS)


def tiny_gguf(path: Path, seed: int = 0, **facts: Any) -> Path:
    """A Llama in a GGUF file, float32, head tied; `facts` by the names of the writer's functions."""
    shapes = {"ffn_up": (128, 64), "ffn_gate": (128, 64), "ffn_down": (64, 128)}
    return _gguf(path, "llama", shapes, {"add_feed_forward_length": 128, **facts}, seed)


def tiny_gguf_moe(path: Path, seed: int = 0) -> Path:
    """A Qwen3-MoE in a GGUF file, four experts as wide as transformers takes them to be; float32, head tied."""
    shapes = {"ffn_gate_inp": (4, 64), "attn_q_norm": (16,), "attn_k_norm": (16,)}
    shapes |= {"ffn_gate_exps": (4, 768, 64), "ffn_up_exps": (4, 768, 64), "ffn_down_exps": (4, 64, 768)}
    facts = {"add_expert_count": 4, "add_expert_used_count": 2, "add_expert_feed_forward_length": 768}
    facts |= {"add_feed_forward_length": 128, "add_key_length": 16, "add_value_length": 16}
    return _gguf(path, "qwen3moe", shapes, facts, seed)


def _gguf(
    path: Path, kind: str, shapes: Mapping[str, tuple[int, ...]], facts: Mapping[str, int], seed: int
) -> Path:
    import gguf

    generator = torch.Generator().manual_seed(seed)
    writer = gguf.GGUFWriter(str(path), kind)
    writer.add_context_length(128)
    writer.add_embedding_length(64)
    writer.add_block_count(2)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(VOCABULARY))
    for name, value in facts.items():
        getattr(writer, name)(value)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(VOCABULARY)
    writer.add_token_types([1] * 256 + [3, 1])
    writer.add_token_merges(["a b"] * 2)  # releases of transformers take a list of one for what is in it
    writer.add_bos_token_id(256)
    writer.add_eos_token_id(256)
    for name, shape in _gguf_shapes(shapes).items():
        values = torch.ones(shape) if len(shape) == 1 else torch.randn(shape, generator=generator) * 0.05
        writer.add_tensor(name, values.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _gguf_shapes(of_kind: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (len(VOCABULARY), 64),
        "output_norm.weight": (64,),
    }
    block = {"attn_norm": (64,), "ffn_norm": (64,), "attn_q": (64, 64), "attn_k": (32, 64)}
    block |= {"attn_v": (32, 64), "attn_output": (64, 64), **of_kind}
    for i in range(2):
        shapes |= {f"blk.{i}.{name}.weight": shape for name, shape in block.items()}
    return shapes


def random_masks(source: ModelSource, pattern: str = "2:4", seed: int = 0, dtype: str = "auto") -> MaskSet:
    """Random masks for every linear weight in the blocks, taken by name from the tensors on disk; not for routers."""
    rule, base = NMPattern(pattern), open_base(source, dtype)
    generator = torch.Generator().manual_seed(seed)
    layers = {}
    for name in base.files:
        if len(base.shape(name)) == 2 and re.search(r"\b(layers|h)\.\d(?!.*(\.gate\.|_log))", name):
            transposed = ".c_" in name
            scores = torch.rand(base.shape(name), generator=generator)
            layers[name] = LayerMask.from_rows(rule.top(scores.T if transposed else scores), transposed)
    return MaskSet(rule, layers, base_model(base, layers))


def _save(
    kind: str, sizes: Mapping[str, Any], directory: Path, seed: int, overrides: Mapping[str, Any]
) -> Path:
    settings = {**sizes, **overrides}
    dtype = settings.pop("dtype", torch.float32)
    shards = {name: settings.pop(name) for name in ("max_shard_size",) if name in settings}
    config = AutoConfig.for_model(kind, **settings)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        lm = AutoModelForCausalLM.from_config(config)
    lm.to(dtype)
    # Random biases and norms, so that a test notices when one is dropped or swapped.
    generator = torch.Generator().manual_seed(seed)
    for parameter in lm.parameters():
        if parameter.ndim == 1:
            noise = torch.randn(parameter.shape, generator=generator) * 0.1
            parameter.data += noise.to(parameter.dtype)
    lm.config.dtype = lm.dtype
    lm.save_pretrained(directory, **shards)
    tiny_tokenizer().save_pretrained(directory)
    return directory
