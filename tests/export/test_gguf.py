"""GGUF files: other programs read what the export held, and `verify` notices what it no longer holds."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGUFReader, TokenType
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from cli_helpers import plain_text, run
from gguf_cases import ARCHITECTURES, TEXTS, pruned, sentencepiece
from roi_lightning.errors import UserError
from roi_lightning.export.gguf_file import verify_gguf, write_gguf
from roi_lightning.masks.mask_set import MaskSet
from roi_lightning.models.config import load_config
from roi_lightning.models.source import resolve_model
from tiny_models import tiny_gemma2, tiny_gemma3, tiny_gpt2, tiny_llama, tiny_mistral

PROMPT = torch.arange(40)[None] * 7 % 256


def read_back(file, **options):
    """The model as transformers, whose reader is not ours, takes it from the file."""
    return AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32, **options
    )


def fields(file):
    return {name: field.contents() for name, field in GGUFReader(file).fields.items()}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_transformers_reads_the_export_from_it(tmp_path, architecture):
    build, settings = ARCHITECTURES[architecture]
    base = build(tmp_path / "base", **settings)
    export = pruned(base, tmp_path / "export")
    write_gguf(export, tmp_path / "model.gguf")
    assert verify_gguf(tmp_path / "model.gguf", resolve_model(str(base))).ok
    wanted = AutoModelForCausalLM.from_pretrained(export, dtype=torch.float32)
    # Of Gemma's settings transformers reads some only from its own files.
    known = {"config": wanted.config} if architecture.startswith("gemma") else {}
    read = read_back(tmp_path / "model.gguf", **known)
    held = read.state_dict()
    assert held.keys() == wanted.state_dict().keys()
    for name, tensor in wanted.state_dict().items():
        if tensor.ndim == 2:  # in float16
            assert torch.equal(held[name], tensor.half().float()), name
        else:
            torch.testing.assert_close(held[name], tensor, rtol=0, atol=1e-6)
    with torch.no_grad():
        torch.testing.assert_close(read(PROMPT).logits, wanted(PROMPT).logits, rtol=0, atol=2e-3)


# One export, converted three times.


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gguf")
    base = tiny_llama(folder / "base")
    export = pruned(base, folder / "export", "--pattern", "1:4")
    for weights in ("f16", "bf16", "q8_0"):
        write_gguf(export, folder / f"{weights}.gguf", weights=weights)
    return folder


@pytest.mark.parametrize("weights", ["f16", "bf16", "q8_0"])
def test_pruned_weights_are_zero_and_kept_ones_near(made, weights):
    masks = MaskSet.load(made / "export").layers
    stored = load_file(made / "export/model.safetensors")
    held = read_back(made / f"{weights}.gguf").state_dict()
    for name, mask in masks.items():
        keep = mask.to_bool()
        assert not held[name][~keep].any()
        error = (held[name] - stored[name]).abs()
        # 11 and 8 bits of a weight, and half of a 127th of the largest of 32, whose scale is float16.
        blocks = (
            stored[name].unflatten(1, (-1, 32)).abs().amax(-1, keepdim=True).expand(-1, -1, 32).flatten(1)
        )
        allowed = {
            "f16": stored[name].abs() / 2**11,
            "bf16": stored[name].abs() / 2**8,
            "q8_0": blocks * 0.57 / 127,
        }
        assert (error <= allowed[weights] + 1e-7).all(), name
        assert held[name][keep].any()


@pytest.mark.parametrize("weights", ["f16", "q8_0"])
def test_weights_too_small_for_float16(tmp_path, weights):
    base = tiny_llama(tmp_path / "base")
    held = load_file(base / "model.safetensors")
    tiny = held["model.layers.0.mlp.up_proj.weight"]
    tiny[0] = torch.tensor([3e-9, -3e-9, 1e-9, -1e-9]).repeat(16)
    tiny[1, ::4] = -2e-8
    save_file(held, base / "model.safetensors", {"format": "pt"})
    write_gguf(pruned(base, tmp_path / "export"), tmp_path / "m.gguf", weights=weights)
    assert verify_gguf(tmp_path / "m.gguf", resolve_model(str(base))).ok
    assert not read_back(tmp_path / "m.gguf").get_parameter("model.layers.0.mlp.up_proj.weight")[0].any()


def test_metadata_is_the_configuration(made):
    said, config = fields(made / "q8_0.gguf"), load_config(resolve_model(str(made / "base")))
    assert said["general.architecture"] == "llama"
    assert said["general.file_type"] == 7
    assert said["llama.block_count"] == config.num_hidden_layers
    assert said["llama.attention.head_count_kv"] == config.num_key_value_heads
    assert said["llama.attention.layer_norm_rms_epsilon"] == pytest.approx(config.rms_norm_eps)
    assert said["llama.rope.freq_base"] == config.rope_parameters["rope_theta"]
    types = {tensor.name: tensor.tensor_type.name for tensor in GGUFReader(made / "q8_0.gguf").tensors}
    assert types["blk.0.attn_q.weight"] == types["output.weight"] == "Q8_0"
    assert types["blk.0.attn_norm.weight"] == "F32"


def test_biases_are_laid_out_as_the_rows_are(tmp_path):
    base = tiny_llama(tmp_path / "base", attention_bias=True)
    held = load_file(base / "model.safetensors")
    for name in ("q", "k"):
        layer = f"model.layers.0.self_attn.{name}_proj"
        held[f"{layer}.weight"][:, 0] = held[f"{layer}.bias"] = torch.arange(len(held[f"{layer}.bias"])) + 9.0
    save_file(held, base / "model.safetensors", {"format": "pt"})
    write_gguf(pruned(base, tmp_path / "export"), tmp_path / "m.gguf")
    arrays = {tensor.name: tensor.data for tensor in GGUFReader(tmp_path / "m.gguf").tensors}
    for name in ("attn_q", "attn_k"):
        assert (arrays[f"blk.0.{name}.weight"][:, 0] == arrays[f"blk.0.{name}.bias"]).all()
    assert arrays["blk.0.attn_q.bias"][:4].tolist() == [9, 17, 10, 18]


def test_rows_that_are_no_whole_number_of_blocks_are_f16(tmp_path, capsys):
    export = pruned(tiny_llama(tmp_path / "base", intermediate_size=72), tmp_path / "export")
    command = ["convert", export, "--to", "gguf", "--weights", "q8_0", "--out", tmp_path / "m.gguf"]
    assert run(*command, "--json", tmp_path / "sizes.json") == 0
    assert "2 matrices are f16" in plain_text(capsys.readouterr().out)
    sizes = json.loads((tmp_path / "sizes.json").read_text())
    assert sizes["as_f16"] == 2
    assert sizes["after"] == (tmp_path / "m.gguf").stat().st_size
    assert run("verify", tmp_path / "m.gguf", "--base", tmp_path / "base") == 0


def test_llama3_positions_are_written_as_divisors(tmp_path):
    rope = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0}
    rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    base = tiny_llama(tmp_path / "base", rope_parameters=rope)
    write_gguf(pruned(base, tmp_path / "export"), tmp_path / "m.gguf")
    divisors = {x.name: x.data for x in GGUFReader(tmp_path / "m.gguf").tensors}["rope_freqs.weight"]
    wanted, _ = ROPE_INIT_FUNCTIONS["llama3"](load_config(resolve_model(str(base))), torch.device("cpu"))
    plain = 5e5 ** (-torch.arange(8) / 8)
    torch.testing.assert_close(plain / torch.from_numpy(np.array(divisors)), wanted)
    assert set(np.unique(divisors)) >= {1.0, 8.0}
    assert verify_gguf(tmp_path / "m.gguf", resolve_model(str(base))).ok


# Tokenizers.


@pytest.mark.parametrize("digits", [False, True])
def test_byte_level_tokens_are_cut_alike(made, tmp_path, digits):
    export = shutil.copytree(made / "base", tmp_path / "base")
    described = json.loads((export / "tokenizer.json").read_text())
    if digits:
        steps = [{"type": "Digits", "individual_digits": True}, described["pre_tokenizer"]]
        described["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": steps}
        (export / "tokenizer.json").write_text(json.dumps(described))
    write_gguf(pruned(export, tmp_path / "export"), tmp_path / "m.gguf")
    said = fields(tmp_path / "m.gguf")
    assert said["tokenizer.ggml.pre"] == ("smollm" if digits else "gpt-2")
    ours = AutoTokenizer.from_pretrained(export)
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf")
    for text in TEXTS:
        assert theirs(text).input_ids == ours(text).input_ids
    assert theirs.eos_token_id == ours.eos_token_id
    assert len(said["tokenizer.ggml.tokens"]) == 264
    assert said["tokenizer.ggml.token_type"][-1] == TokenType.UNUSED


def test_sentencepiece_vocabularies(tmp_path):
    base = tiny_llama(tmp_path / "base")
    sentencepiece(base)
    write_gguf(pruned(base, tmp_path / "export"), tmp_path / "m.gguf")
    said = fields(tmp_path / "m.gguf")
    assert said["tokenizer.ggml.model"] == "llama"
    assert said["tokenizer.ggml.add_space_prefix"] is True
    kinds, tokens = said["tokenizer.ggml.token_type"], said["tokenizer.ggml.tokens"]
    assert kinds[:4] == [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL, TokenType.BYTE]
    scores = dict(zip(tokens, said["tokenizer.ggml.scores"], strict=True))
    assert scores["he"] > scores["ll"] > scores["hell"] > scores["▁hello"] > scores["h"] == scores["<s>"]


# Refusals.


YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}


@pytest.mark.parametrize(
    ("build", "settings", "said"),
    [
        (
            tiny_llama,
            {"rope_parameters": YARN | {"attention_factor": 1.5}},
            "'yarn', as they are set up here",
        ),
        (tiny_llama, {"rope_parameters": YARN | {"beta_fast": 16.0}}, "'yarn', as they are set up here"),
        (tiny_gpt2, {}, "models of type 'gpt2' are not written as GGUF"),
        (tiny_llama, {"hidden_act": "gelu"}, "activation is gelu, and llama.cpp takes it to be silu"),
        (tiny_llama, {"mlp_bias": True}, "have no tensor 'model.layers.0.mlp.down_proj.bias'"),
        (tiny_mistral, {}, "sliding_window is 8"),
        (tiny_gemma2, {}, "query_pre_attn_scalar is 256"),
        (tiny_gemma3, {}, "layer_types is"),
        (
            tiny_llama,
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "'dynamic'",
        ),
    ],
)
def test_what_llama_cpp_can_not_run_is_refused(tmp_path, build, settings, said):
    export = pruned(build(tmp_path / "base", **settings), tmp_path / "export")
    with pytest.raises(UserError, match=r"GGUF|llama\.cpp") as refused:
        write_gguf(export, tmp_path / "m.gguf")
    assert said in str(refused.value)
    assert not (tmp_path / "m.gguf").exists()


def test_a_cut_without_a_name_is_refused(made, tmp_path):
    base = shutil.copytree(made / "base", tmp_path / "base")
    described = json.loads((base / "tokenizer.json").read_text())
    described["pre_tokenizer"] = {"type": "Whitespace"}
    (base / "tokenizer.json").write_text(json.dumps(described))
    with pytest.raises(
        UserError, match=r"cuts text in a way that has no name in llama.cpp here \(Whitespace\)"
    ):
        write_gguf(pruned(base, tmp_path / "export"), tmp_path / "m.gguf")


def test_weights_beyond_float16(made, tmp_path):
    base = shutil.copytree(made / "base", tmp_path / "base")
    held = load_file(base / "model.safetensors")
    held["model.layers.0.mlp.up_proj.weight"][0, 0] = 70000.0
    save_file(held, base / "model.safetensors", {"format": "pt"})
    export = pruned(base, tmp_path / "export")
    with pytest.raises(
        UserError, match=r"'model.layers.0.mlp.up_proj.weight' has weights beyond.*--weights bf16"
    ):
        write_gguf(export, tmp_path / "m.gguf")
    write_gguf(export, tmp_path / "m.gguf", weights="bf16")


def test_other_files_and_directories(made, tmp_path):
    with pytest.raises(UserError, match="no directory"):
        write_gguf(tmp_path / "none", tmp_path / "m.gguf")
    with pytest.raises(UserError, match=r"'m' does not end in \.gguf"):
        write_gguf(made / "export", Path("m"))
    with pytest.raises(UserError, match=r"can't be converted: its roi_sparsity\.json can't be read"):
        write_gguf(made / "base", tmp_path / "m.gguf")
    (tmp_path / "m.gguf").write_text("mine")
    with pytest.raises(UserError, match="exists; pass --overwrite"):
        write_gguf(made / "export", tmp_path / "m.gguf")
    assert (tmp_path / "m.gguf").read_text() == "mine"
    with pytest.raises(UserError, match="can't be read as GGUF"):
        verify_gguf(tmp_path / "m.gguf")
    write_gguf(made / "export", tmp_path / "m.gguf", overwrite=True)
    assert verify_gguf(tmp_path / "m.gguf").ok


# Damage.


def spoiled(made, tmp_path, change):
    file = shutil.copy(made / "f16.gguf", tmp_path / "m.gguf")
    reader = GGUFReader(file, "r+")
    change(reader)
    del reader
    return {check.name: check for check in verify_gguf(file, resolve_model(str(made / "base"))).checks}


def tensor(reader, name):
    (found,) = (x for x in reader.tensors if x.name == name)
    return found.data


def test_a_weight_where_there_was_none(made, tmp_path):
    def change(reader):
        values = tensor(reader, "blk.1.ffn_up.weight")
        row = np.array(values[0])
        values[0, np.flatnonzero(row == 0)[0]] = 1

    checks = spoiled(made, tmp_path, change)
    assert [name for name, check in checks.items() if not check.ok] == ["checksums", "zeros", "survivors"]
    assert "blk.1.ffn_up.weight" in checks["zeros"].detail


def test_another_setting(made, tmp_path):
    def change(reader):
        field = reader.fields["llama.rope.freq_base"]
        field.parts[field.data[0]][0] = 500000.0

    checks = spoiled(made, tmp_path, change)
    assert [name for name, check in checks.items() if not check.ok] == ["metadata"]


def test_a_negative_zero(made, tmp_path):
    def change(reader):
        values = tensor(reader, "blk.0.ffn_up.weight")
        values[0, np.flatnonzero(np.array(values[0]) == 0)[0]] = -0.0

    assert not spoiled(made, tmp_path, change)["zeros"].ok


def test_another_kept_weight(made, tmp_path):
    def change(reader):
        values = tensor(reader, "blk.0.attn_q.weight")
        values[3, np.flatnonzero(np.array(values[3]))[0]] *= 2

    checks = spoiled(made, tmp_path, change)
    assert [name for name, check in checks.items() if not check.ok] == ["checksums", "survivors"]


def test_another_norm(made, tmp_path):
    def change(reader):
        tensor(reader, "output_norm.weight")[0] += 1

    checks = spoiled(made, tmp_path, change)
    assert [name for name, check in checks.items() if not check.ok] == ["checksums", "other tensors"]


def test_another_base(made, tmp_path):
    other = tiny_llama(tmp_path / "other", seed=1)
    report = verify_gguf(made / "q8_0.gguf", resolve_model(str(other)))
    assert [check.name for check in report.failures] == ["survivors", "other tensors"]


def test_a_changed_record(made, tmp_path):
    file = shutil.copy(made / "f16.gguf", tmp_path / "m.gguf")
    content = file.read_bytes()
    assert content.count(b'"pattern":"1:4"') == 1
    file.write_bytes(content.replace(b'"pattern":"1:4"', b'"pattern":"2:4"'))
    assert [check.name for check in verify_gguf(file).failures] == ["metadata"]
