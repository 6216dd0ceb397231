import json
import sys
from functools import partial

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from helpers.directories import export_of, tensors_of
from helpers.tiny_models import random_masks, tiny_gguf, tiny_gpt2, tiny_llama, tiny_qwen2
from roi_lightning.export import write_export
from roi_lightning.export.sidecar import command_line, public_name
from roi_lightning.masks.mask_set import MaskSet
from roi_lightning.models.base_tensors import LoadedBase
from roi_lightning.models.loading import load_language_model
from roi_lightning.models.source import resolve_model

BUILDERS = {
    "qwen2": tiny_qwen2,
    "llama, sharded": partial(tiny_llama, max_shard_size="100KB"),
    "gpt2": tiny_gpt2,
    "gpt2, no prefix": partial(tiny_gpt2, prefix=False),
}


def logits(lm):
    tokens = torch.arange(24).reshape(2, 12) * 7 % 256
    with torch.no_grad():
        return lm.eval()(tokens).logits


@pytest.mark.parametrize("builder", BUILDERS.values(), ids=BUILDERS)
@pytest.mark.parametrize("pattern", ["2:4", "1:8"])
def test_the_export_computes_what_the_masked_base_computes(tmp_path, builder, pattern):
    source, masks, out = export_of(builder(tmp_path / "base"), pattern)
    lm = AutoModelForCausalLM.from_pretrained(source.path)
    parameters = dict(lm.named_parameters())
    for name, layer in masks.layers.items():
        weight = parameters[name] if name in parameters else parameters[f"transformer.{name}"]
        mask, dim = layer.to_bool(), 0 if "c_" in name else 1
        groups = mask.float().movedim(dim, 1).reshape(-1, masks.pattern.m).sum(1)
        assert groups.unique().tolist() == [masks.pattern.n]
        weight.data = torch.where(mask, weight.data, torch.zeros((), dtype=weight.dtype))
    exported = AutoModelForCausalLM.from_pretrained(out)
    assert exported.dtype == lm.dtype
    assert torch.equal(logits(exported), logits(lm))
    text = "once upon a time"
    assert AutoTokenizer.from_pretrained(out)(text) == AutoTokenizer.from_pretrained(source.path)(text)


@pytest.mark.parametrize("builder", BUILDERS.values(), ids=BUILDERS)
def test_kept_weights_and_all_else_are_the_bytes_of_the_base(tmp_path, builder):
    source, masks, out = export_of(builder(tmp_path / "base"))
    base, exported = tensors_of(source.path), tensors_of(out)
    assert list(base) == list(exported)
    for name in base:
        size = {2: torch.int16, 4: torch.int32}[base[name].element_size()]
        before, after = base[name].view(size), exported[name].view(size)
        if name in masks.layers:
            mask = masks.layers[name].to_bool()
            assert torch.equal(before[mask], after[mask])
            assert not after[~mask].any(), "a pruned weight is -0.0 or not zero"
        else:
            assert torch.equal(before, after)
    for file in source.path.iterdir():
        if not file.name.endswith(".safetensors"):
            assert (out / file.name).read_bytes() == file.read_bytes()
    for kind in ("embed_tokens", "lm_head", "wte", "wpe"):
        assert not any(kind in name for name in masks.layers)


def test_shards_keep_their_names_and_headers(tmp_path):
    source, _, out = export_of(BUILDERS["llama, sharded"](tmp_path / "base"))
    shards = sorted(path.name for path in source.path.glob("*.safetensors"))
    assert len(shards) > 2
    assert shards == sorted(path.name for path in out.glob("model*.safetensors"))
    for shard in shards:
        before, after = (source.path / shard).read_bytes(), (out / shard).read_bytes()
        header = 8 + int.from_bytes(before[:8], "little")
        assert before[:header] == after[:header]
        assert len(before) == len(after)


def test_only_the_base_model_s_own_companions_come_along(tmp_path):
    base = tiny_qwen2(tmp_path / "base")
    copied = ["LICENSE", "NOTICE.txt", "chat_template.jinja", "merges.txt"]
    copied += ["additional_chat_templates/t.jinja"]
    left = ["pytorch_model.bin", "optimizer.pt", "pytorch_model.bin.index.json", "._config.json"]
    written = ["README.md", "roi_sparsity.json"]
    for name in [*copied, *left, *written]:
        (base / name).parent.mkdir(exist_ok=True)
        (base / name).write_text(f"text of {name}")
    _, _, out = export_of(base)
    assert all((out / name).read_text() == f"text of {name}" for name in copied)
    assert not any((out / name).exists() for name in left)
    assert not any("text of" in (out / name).read_text() for name in written)


def test_the_sidecar_and_the_card_say_what_was_done(tmp_path):
    training = {"steps": 3, "loss": float("nan"), "sampler": "topk"}
    facts = {"training": training, "perplexity": {"dense": 12.5}}
    source, masks, out = export_of(tiny_qwen2(tmp_path / "base"), **facts)
    sidecar = json.loads((out / "roi_sparsity.json").read_text())
    tensors = tensors_of(out)
    assert (sidecar["pattern"], sidecar["n"], sidecar["m"]) == ("2:4", 2, 4)
    assert sidecar["base"] == {"spec": source.spec, "revision": None, "dtype": "bfloat16"}
    assert sidecar["parameters"] == sum(x.numel() for x in tensors.values())
    zeros = sum((~masks.layers[name].to_bool()).sum().item() for name in masks.layers)
    assert sidecar["zero_fraction"] == zeros / sidecar["parameters"]
    assert set(sidecar["layers"]) == set(masks.layers)
    assert {entry["density"] for entry in sidecar["layers"].values()} == {0.5}
    assert sidecar["training"] == {"steps": 3, "loss": "NaN", "sampler": "topk"}
    assert sidecar["perplexity"] == {"dense": 12.5}
    assert set(sidecar["files"]) == {path.name for path in out.iterdir()} - {"roi_sparsity.json"}
    card = (out / "README.md").read_text()
    assert "base_model" not in card, "a local directory is no hub id"
    assert f"{zeros:,} of {sidecar['parameters']:,}" in card
    assert "| `gate_proj` | 2 | 16,384 | 50.0% |" in card
    assert "12.5" in card
    assert str(tmp_path) not in card


def test_the_card_of_a_hub_model_names_it(tmp_path, monkeypatch):
    folder = tiny_qwen2(tmp_path / "snapshots" / "c0ffee")
    monkeypatch.setattr("roi_lightning.models.source._snapshot", lambda name, revision: folder)
    source = resolve_model("owner/model")
    masks = random_masks(source)
    out = write_export(source, masks, tmp_path / "out")
    front = yaml.safe_load((out / "README.md").read_text().split("---")[1])
    assert (front["base_model"], front["base_model_relation"]) == ("owner/model", "finetune")
    assert "2:4" in front["tags"]
    assert MaskSet.load(out).base.revision == "c0ffee"


@pytest.mark.parametrize(
    ("argv", "recorded"),
    [
        (["/x/bin/roi-lightning", "fit", "-c", "a.yaml"], ["fit", "-c", "a.yaml"]),
        (["/x/roi_lightning/__main__.py", "fit"], ["fit"]),
        (["/x/other/__main__.py", "fit"], None),
        (["roi-lightning", "--a.api_key", "abc", "--b"], ["--a.api_key", "REDACTED", "--b"]),
        (["roi-lightning", "--a.b_token=abc"], ["--a.b_token=REDACTED"]),
        (["roi-lightning", '{"api_key": "abc", "b": 1}'], ['{"api_key": REDACTED, "b": 1}']),
        (["roi-lightning", "hf_" + "x" * 34], ["REDACTED"]),
        (["roi-lightning", "--data.tokenizer", "owner/name"], ["--data.tokenizer", "owner/name"]),
    ],
)
def test_the_command_is_recorded_without_secrets(argv, recorded, monkeypatch):
    monkeypatch.setattr(sys, "argv", argv)
    assert command_line() == recorded


def test_names_of_others_stay_and_folders_go():
    assert public_name("/home/me/texts/*.txt, owner/name") == "*.txt, owner/name"
    assert public_name("gguf:../m.gguf") == "m.gguf"
    assert public_name("{source: ~/notes.jsonl.gz, field: x}") == "{source: notes.jsonl.gz, field: x}"
    assert public_name("/home/me/my texts/a.txt") == "a.txt"
    assert public_name("texts/a.jsonl, texts/a.parquet") == "a.jsonl, a.parquet"


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_gguf_base_becomes_an_ordinary_directory(tmp_path, dtype):
    source, masks, out = export_of(tiny_gguf(tmp_path / "base.gguf"), dtype=dtype)
    assert masks.base.dtype == dtype
    lm = load_language_model(source, "float32")
    for parameter in lm.parameters():  # not the buffers: transformers keeps rotary frequencies in fp32
        parameter.data = parameter.data.to(getattr(torch, dtype))
    for name, layer in masks.layers.items():
        lm.get_parameter(name).data[~layer.to_bool()] = 0
    exported = AutoModelForCausalLM.from_pretrained(out)
    assert str(exported.dtype) == f"torch.{dtype}"
    assert exported.config.use_cache
    assert torch.equal(logits(exported), logits(lm))
    assert "lm_head.weight" not in tensors_of(out)
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert tokenizer.decode(tokenizer("above all").input_ids) == "above all"
    assert (
        "`base.gguf`, whose matrices are 14 F32 in the blocks and 1 F32\n" in (out / "README.md").read_text()
    )
    loaded = LoadedBase(source, load_language_model(source, dtype))
    again = write_export(loaded, MaskSet.load(out), tmp_path / "again")
    for file in out.iterdir():
        assert (again / file.name).read_bytes() == file.read_bytes()
