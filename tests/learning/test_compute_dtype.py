"""Half-width models on CPUs without instructions for them: fp32 in memory, the stored dtype in every file."""

import pytest
import torch
from safetensors.torch import load_file
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from helpers.lab import make_lab, run
from helpers.tiny_models import tiny_gguf, tiny_mixtral, tiny_qwen2
from roi_lightning.api import apply, evaluate, learn
from roi_lightning.api import prune as prune_in_memory
from roi_lightning.learning.callbacks import SparseExport
from roi_lightning.models.config import compute_dtype
from roi_lightning.models.loading import load_language_model
from roi_lightning.models.source import resolve_model

lab = pytest.fixture(make_lab)
CPU = torch.device("cpu")
HALF_WIDTH = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize(
    ("able", "fast"),
    [
        ({"architecture": "x86_64", "avx2": True, "avx512_bf16": False, "amx_bf16": False}, False),
        ({"architecture": "x86_64", "avx2": True, "avx512_bf16": True, "amx_bf16": False}, True),
        ({"architecture": "x86_64", "avx512_bf16": True, "avx512_fp16": True, "amx_bf16": True}, True),
        ({"architecture": "x86_64", "avx512_bf16": True, "avx512_fp16": True, "amx_bf16": False}, False),
        ({"architecture": "arm64", "neon": True, "bf16": False}, False),
        ({"architecture": "arm64", "neon": True, "bf16": True}, True),
        ({"architecture": "unheard of"}, True),
    ],
)
def test_cpus_without_instructions_are_known(half_width, monkeypatch, able, fast):
    half_width(True)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: able)
    assert compute_dtype(torch.bfloat16, CPU) == (torch.bfloat16 if fast else torch.float32)
    assert compute_dtype(torch.bfloat16, torch.device("cuda")) == torch.bfloat16
    assert compute_dtype(torch.float32, CPU) == torch.float32
    assert compute_dtype(torch.float64, CPU) == torch.float64


def dtypes(lm):
    return {parameter.dtype for parameter in lm.parameters()}


@pytest.mark.parametrize("dtype", HALF_WIDTH)
@pytest.mark.parametrize("builder", [tiny_qwen2, tiny_mixtral])
def test_auto_is_fp32_where_the_stored_dtype_is_slow(tmp_path, half_width, builder, dtype):
    source = resolve_model(str(builder(tmp_path / "m", dtype=dtype)))
    for answer, expected in ((True, dtype), (False, torch.float32)):
        half_width(answer)
        lm = load_language_model(source, device=CPU)
        assert dtypes(lm) == {expected}
        plain = load_language_model(source)
        assert dtypes(plain) == {dtype}
        for name, weight in plain.named_parameters():
            assert torch.equal(lm.get_parameter(name), weight.to(expected)), name


def stored_alike(directory, base):
    """Every tensor has the base's dtype, and the base's bits wherever it is not zero."""
    found, expected = (load_file(folder / "model.safetensors") for folder in (directory, base))
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert tensor.dtype == expected[name].dtype == torch.bfloat16, name
        assert torch.equal(tensor, torch.where(tensor == 0, torch.zeros_like(tensor), expected[name])), name


def test_a_run_learns_in_fp32_and_exports_the_stored_bytes(lab, tmp_path, half_width):
    half_width(False)
    out = tmp_path / "out"
    learner, _ = lab.learn(2, callbacks=[SparseExport(str(out))])
    frozen = {weight.dtype for name, weight in learner.student.named_parameters()}
    assert frozen == {torch.float32}
    stored_alike(out, lab.model)
    assert run("verify", out, "--base", lab.model) == 0
    assert learner.mask_set().base.dtype == "bfloat16"


@pytest.mark.parametrize("method", ["magnitude", "wanda"])
def test_prune_exports_the_stored_bytes(lab, tmp_path, half_width, method):
    half_width(False)
    text = [] if method == "magnitude" else ["--corpora", lab.corpus, "--windows", 3, "--seq_len", 32]
    assert run("prune", lab.model, "--method", method, *text, "--out", tmp_path / "out") == 0
    stored_alike(tmp_path / "out", lab.model)
    assert run("verify", tmp_path / "out", "--base", lab.model) == 0


@pytest.mark.parametrize("command", ["fit", "prune"])
def test_a_gguf_model_is_exported_in_bf16_on_every_cpu(lab, tmp_path, half_width, command):
    model, configs, weights = tiny_gguf(tmp_path / "base.gguf"), [], []
    for answer in (True, False):
        half_width(answer)
        out = tmp_path / f"out{answer}"
        if command == "prune":
            assert run("prune", model, "--method", "magnitude", "--out", out) == 0
        else:
            export, data = [SparseExport(str(out))], lab.data(tokenizer=str(model))
            learner, _ = lab.learn(1, model=model, data=data, callbacks=export)
            assert learner.teacher.dtype == (torch.bfloat16 if answer else torch.float32)
        assert run("verify", out, "--base", model) == 0
        configs.append((out / "config.json").read_text())
        weights.append(load_file(out / "model.safetensors"))
        assert {tensor.dtype for tensor in weights[-1].values()} == {torch.bfloat16}
    assert configs[0] == configs[1]
    if command == "prune":
        assert all(torch.equal(weights[1][name], tensor) for name, tensor in weights[0].items())


def test_models_in_memory_stay_what_they_are(lab, half_width):
    half_width(False)
    lm = AutoModelForCausalLM.from_pretrained(lab.model, dtype=torch.bfloat16)
    tokenizer, before = (
        AutoTokenizer.from_pretrained(lab.model),
        {n: x.clone() for n, x in lm.state_dict().items()},
    )
    quick = {"seq_len": 32, "accelerator": "cpu", "enable_progress_bar": False}
    learned = learn(lm, tokenizer, str(lab.corpus), steps=1, windows_per_step=2, **quick)
    pruned = prune_in_memory(
        lm, tokenizer, str(lab.corpus), method="sparsegpt", windows=2, seq_len=32, device="cpu"
    )
    assert {x.dtype for x in pruned.updates.values()} == {torch.bfloat16}
    assert learned.base.dtype == pruned.masks.base.dtype == "bfloat16"
    assert all(torch.equal(lm.state_dict()[name], x) for name, x in before.items())
    apply(lm, learned)
    assert dtypes(lm) == {torch.bfloat16}
    assert evaluate(lm, tokenizer, lab.corpus, seq_len=32, limit=2)
    assert AttentionInterface()["sdpa"] is sdpa_attention_forward
