"""`plan`: its numbers against a real model's tensors and a real optimizer's state."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from cli_helpers import make_lab, plain_text, run
from roi_lightning.commands.plan import make_plan
from tiny_models import tiny_gpt2, tiny_qwen2

lab = pytest.fixture(make_lab)
PARTS = {"weights", "logits", "gradients", "optimizer", "masked_weights", "total"}


@pytest.fixture
def qwen_half_b(tmp_path):
    """Qwen2.5-0.5B's shape, and nothing else of it."""
    folder = tmp_path / "qwen2.5-0.5b"
    config = Qwen2Config(
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        vocab_size=151936,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        dtype="bfloat16",
        architectures=["Qwen2ForCausalLM"],
    )
    config.save_pretrained(folder)
    return folder


def test_the_papers_run_on_qwen_half_b(lab, qwen_half_b, capsys):
    out = lab.folder / "plan.json"
    assert run("plan", "--config", "qwen0.5b_2of4.yaml", "--model.lm", qwen_half_b, "--json", out) == 0
    plan = json.loads(out.read_text())
    per_block = 2 * 896 * 896 + 2 * 128 * 896 + 3 * 896 * 4864
    assert plan["prunable"] == plan["logits"] == 24 * per_block == 357_826_560
    assert plan["steps"] == 2000
    assert plan["tokens"] == 2000 * 256 * 4096
    sizes = plan["bytes"]
    assert sizes.keys() >= PARTS
    assert sizes["logits"] == sizes["gradients"] == 4 * plan["logits"]
    assert sizes["optimizer"] == 8 * plan["logits"]
    assert sizes["masked_weights"] == 2 * plan["prunable"]
    assert sizes["weights"] == 2 * 494_032_768, "the published parameter count"
    assert sizes["total"] == sum(size for part, size in sizes.items() if part != "total")
    printed = plain_text(capsys.readouterr().out)
    assert "357,826,560" in printed
    assert "2,097,152,000" in printed


@pytest.mark.parametrize("builder", [tiny_qwen2, tiny_gpt2])
@pytest.mark.parametrize("dtype", ["auto", "float32", "float16"])
def test_bytes_are_those_of_real_tensors(lab, builder, dtype):
    model = builder(lab.folder / "m")
    lm = AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
    plan = make_plan(["--config", "quickstart.yaml", *lab.options(model=model), "--model.dtype", dtype])
    learner, trainer = lab.learn(1, model=model, dtype=dtype)
    weights = {p.data_ptr(): p.numel() * p.element_size() for p in lm.parameters()}
    assert plan["bytes"]["weights"] == sum(weights.values())
    logits = [layer.logits for layer in learner.layers.values()]
    assert plan["logits"] == sum(x.numel() for x in logits)
    assert plan["bytes"]["logits"] == sum(x.numel() * x.element_size() for x in logits)
    state = [x for per in trainer.optimizers[0].state.values() for x in per.values() if x.ndim]
    assert plan["bytes"]["optimizer"] == sum(x.numel() * x.element_size() for x in state)
    with learner.under_masks():
        masked = [layer.effective_weight() for layer in learner.layers.values()]
        assert plan["bytes"]["masked_weights"] == sum(x.numel() * x.element_size() for x in masked)
    assert plan["tokens"] == 4 * 2 * 32


def test_the_optimizers_state_is_the_configured_optimizers(lab):
    command = ["--config", "quickstart.yaml", *lab.options(), "--model.optimizer", "torch.optim.SGD"]
    assert make_plan(command)["bytes"]["optimizer"] == 0
    plan = make_plan([*command, "--model.optimizer.momentum", "0.9"])
    assert plan["bytes"]["optimizer"] == 4 * plan["logits"]


@pytest.mark.parametrize("accelerator", ["gpu", "cpu", "auto"])
def test_devices_that_are_not_here_can_be_planned_for(lab, accelerator):
    command = ["--config", "qwen0.5b_2of4.yaml", *lab.options(accumulate=8), "--trainer.devices", "8"]
    plan = make_plan([*command, "--trainer.accelerator", accelerator])
    assert plan["tokens"] == 4 * 8 * 8 * 2 * 32


@pytest.mark.parametrize("more", [["--model.pattern", "2:3"], ["--model.ignore", "[nothing_like_this]"]])
def test_plan_refuses_what_fit_refuses(lab, capsys, more):
    assert run("plan", "--config", "quickstart.yaml", *lab.options(), *more) == 1
    assert capsys.readouterr().err.startswith("error: ")


def test_plan_reads_no_weight(lab, monkeypatch):
    for name in ("load_file", "safe_open"):
        monkeypatch.setattr(f"safetensors.torch.{name}", lambda *a, **k: pytest.fail("read weights"))
    (lab.folder / "m").mkdir()
    (lab.folder / "m" / "config.json").write_text((lab.model / "config.json").read_text())
    assert make_plan(["--config", "quickstart.yaml", *lab.options(model=lab.folder / "m")])["prunable"] > 0
    assert torch.get_default_dtype() == torch.float32
