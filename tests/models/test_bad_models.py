"""Model directories and GGUF files that are broken, unknown or of the wrong kind, given to every command."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import BertConfig, BertForMaskedLM, T5Config, T5ForConditionalGeneration

from helpers.directories import add
from helpers.lab import run
from helpers.refusals import assert_refused, cut, flipped, make_bench, rows
from helpers.tiny_models import tiny_gguf, tiny_llama, tiny_tokenizer

bench = pytest.fixture(make_bench)
Q = "model.layers.0.self_attn.q_proj.weight"


def fit(bench, model):
    return ["fit", *bench.lean(model=model)]


def plan(bench, model):
    return ["plan", *bench.lean(model=model)]


def prune(bench, model):
    return ["prune", model, "--method", "magnitude", "--out", "out"]


def wanda(bench, model):
    words = ["--method", "wanda", "--corpora", bench.corpus, "--windows", "2", "--seq_len", "32"]
    return ["prune", model, *words, "--out", "out"]


def apply(bench, model):
    return ["apply", model, bench.mask, "--out", "out"]


def evaluate(bench, model):
    return ["evaluate", model, "--text", bench.corpus, "--seq_len", "32", "--json", "out.json"]


def on_marked(command):
    """A command on the text of `beyond`."""
    return lambda bench, model: [
        "c.jsonl" if str(word) == str(bench.corpus) else word for word in command(bench, model)
    ]


def beyond(bench):
    """A model whose tokenizer was given ten tokens more, and a text with the last of them."""
    model, tokenizer = bench.copy(bench.model), tiny_tokenizer()
    tokenizer.add_tokens([f"<x{i}>" for i in range(10)])
    tokenizer.save_pretrained(model)
    bench.write("c.jsonl", bench.corpus.read_text().replace("cat", "<x9>"))
    return model


def changed(file, change):
    """A copy of the bench's model with the bytes of one file changed; None removes it."""

    def make(bench):
        model = bench.copy(bench.model)
        content = change((model / file).read_bytes())
        if content is None:
            (model / file).unlink()
        else:
            (model / file).write_bytes(content)
        return model

    return make


def configured(**entries):
    return changed("config.json", lambda data: json.dumps(json.loads(data) | entries).encode())


OWN = """
from pathlib import Path
from transformers import Qwen2Config, Qwen2ForCausalLM
Path(__file__).with_name("it_ran").touch()
Path("it_ran").touch()
class Config(Qwen2Config):
    model_type = "own"
class Model(Qwen2ForCausalLM):
    config_class = Config
"""


def with_code(bench):
    """A model directory that brings its own code, which leaves a file where it runs."""
    model = configured(
        model_type="own", auto_map={"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    )(bench)
    (model / "own.py").write_text(OWN)
    return model


def weights(change):
    def make(bench):
        model = bench.copy(bench.model)
        tensors = {name: x.clone() for name, x in load_file(model / "model.safetensors").items()}
        save_file(change(tensors), model / "model.safetensors", {"format": "pt"})
        return model

    return make


def without(name):
    return weights(lambda tensors: {n: x for n, x in tensors.items() if n != name})


def with_value(name, value):
    def change(tensors):
        tensors[name].view(-1)[7] = value
        return tensors

    return weights(change)


def removed(*_):
    return None


def text(content):
    return lambda _: content.encode()


def sharded(change):
    def make(bench):
        model = tiny_llama(bench.folder / "shards", max_shard_size="150KB")
        index = model / "model.safetensors.index.json"
        change(model, index)
        return model

    return make


def cut_shard(model, index):
    shard = sorted(model.glob("model-*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-100])


def swap_shards(model, index):
    one, other, *_ = sorted(model.glob("model-*.safetensors"))
    one.rename(model / "x")
    other.rename(one)
    (model / "x").rename(other)


def added(what):
    return sharded(lambda model, index: add(model, what))


def pickled(bench):
    model = bench.copy(bench.model)
    torch.save(load_file(model / "model.safetensors"), model / "pytorch_model.bin")
    (model / "model.safetensors").unlink()
    return model


def encoder(bench):
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    return _saved(bench, BertForMaskedLM(BertConfig(vocab_size=264, **sizes)))


def encoder_decoder(bench):
    sizes = {"d_model": 32, "d_kv": 16, "d_ff": 32, "num_layers": 2, "num_heads": 2}
    return _saved(bench, T5ForConditionalGeneration(T5Config(vocab_size=264, **sizes)))


def _saved(bench, lm) -> Path:
    lm.save_pretrained(bench.folder / "lm")
    tiny_tokenizer().save_pretrained(bench.folder / "lm")
    return bench.folder / "lm"


def gguf(change):
    def make(bench):
        path = tiny_gguf(bench.folder / "bad.gguf")
        path.write_bytes(change(path.read_bytes()))
        return path

    return make


def damaged_export(bench):
    model = bench.copy(bench.export)
    file = model / "model.safetensors"
    file.write_bytes(flipped(0.9)(file.read_bytes()))
    return model


def packed(bench):
    return bench.packed


def damaged_packed(bench):
    model = bench.copy(bench.packed)
    file = model / "model.safetensors"
    file.write_bytes(flipped(0.9)(file.read_bytes()))
    return model


def narrow(bench):
    """60 inputs: neither 8 nor 16 divides them."""
    return tiny_llama(bench.folder / "narrow", hidden_size=60, num_attention_heads=2, num_key_value_heads=2)


TABLE = {
    # Configurations.
    "a broken config": (changed("config.json", text("{")), prune, "can't be read"),
    "an unknown architecture": (configured(model_type="martian"), prune, "can't be read.*martian"),
    "code of its own": (with_code, prune, "custom code.*set trust_remote_code"),
    "another width": (
        configured(intermediate_size=256),
        prune,
        r"down_proj.weight' is \[64, 128\] and its configuration wants \[64, 256\]",
    ),
    "packed weights, pruned": (
        configured(quantization_config={"quant_method": "gptq", "bits": 4}),
        prune,
        "its weights are packed.*give the unquantised",
    ),
    "packed weights that the configuration knows nothing of": (
        weights(lambda tensors: tensors | {Q: tensors[Q].to(torch.float8_e4m3fn)}),
        fit,
        "q_proj.weight as F8_E4M3: its weights are packed.*give the unquantised",
    ),
    "a revision of a folder": (
        lambda bench: bench.model,
        lambda bench, model: [*prune(bench, model), "--revision", "v1"],
        "has no revision 'v1'",
    ),
    # Weights.
    "no weights": (changed("model.safetensors", removed), fit, "holds no model.safetensors"),
    "only pickled weights, applied": (pickled, apply, "only safetensors are read"),
    "cut weights": (changed("model.safetensors", cut(0.5)), prune, "can't be read"),
    "flipped weights, applied": (changed("model.safetensors", flipped(0.9)), apply, "has other values"),
    "a flipped export, evaluated": (damaged_export, evaluate, "model.safetensors.*changed since"),
    "a tensor missing": (without(Q), prune, "lacks 1 tensors, .*q_proj.weight"),
    "a tensor missing, applied": (without(Q), apply, "there is no tensor .*q_proj"),
    "NaN": (with_value(Q, float("nan")), prune, "NaN or infinity in .*q_proj.weight.* a wider --dtype"),
    # Packed directories.
    **{
        f"a packed directory, {name}": (packed, command, "holds weights as roi_lightning.packed; .*made from")
        for name, command in {
            "learned on": fit,
            "pruned": prune,
            "applied to": apply,
        }.items()
    },
    "a flipped packed directory, evaluated": (
        damaged_packed,
        evaluate,
        "model.safetensors' has changed since",
    ),
    # Shards.
    "a cut shard": (sharded(cut_shard), prune, "can't be read"),
    "shards by each other's names": (sharded(swap_shards), prune, "the index and .* differ in"),
    # More than one answer to what the model is.
    "a whole file": (added("a whole file"), prune, "model.safetensors' beside 'model-0"),
    "an adapter": (added("adapter_config.json"), evaluate, "adapter_config.json' beside 'model-0.*; remove"),
    "other weights": (added("other weights"), evaluate, "other.safetensors' beside 'model-0"),
    "a link": (added("a link"), prune, "generation_config.json' is a link out.*; move"),
    # Tokenizers.
    "no tokenizer": (changed("tokenizer.json", removed), fit, "no tokenizer"),
    "a broken tokenizer": (changed("tokenizer.json", text("{")), fit, "can't be read"),
    **{
        f"a token without an embedding, {name}": (beyond, on_marked(command), "'<x9>', number 267: .* 264;")
        for name, command in {"measured": evaluate, "pruned": wanda, "learned from": fit}.items()
    },
    # Kinds.
    "an encoder": (encoder, prune, "is an encoder.*give a causal"),
    "an encoder and decoder": (encoder_decoder, prune, "no causal language model of type .t5"),
    "16 does not divide": (
        narrow,
        lambda bench, lm: [*plan(bench, lm), "--model.pattern", "4:16"],
        "60 inputs, which 16 does not divide",
    ),
    # GGUF files.
    "a GGUF cut in its weights": (gguf(cut(0.7)), prune, "can't be read"),
}


@rows(TABLE)
def test_refused(bench, capsys, make, command, says):
    made = make(bench)
    assert_refused(bench, capsys, command(bench, made), says, made)


def test_code_of_its_own_is_run_where_that_is_asked_for(bench, monkeypatch):
    """What shows that the rows above would notice."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(bench.folder / "modules"))
    model = with_code(bench)
    assert run(*fit(bench, model), "--model.trust_remote_code", "true") == 0
    assert (bench.folder / "it_ran").exists()
