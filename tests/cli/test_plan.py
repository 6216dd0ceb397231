"""`plan`: its numbers against a real model's tensors and a real optimizer's state."""

import json
import re
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.plan_table import architecture
from benchmarks.speed.timing import peak_bytes
from helpers.lab import draw, make_lab, plain_text, run
from helpers.tiny_models import tiny_gpt2, tiny_llama, tiny_qwen2
from roi_lightning.cli.fit_in import parse_size
from roi_lightning.cli.plan import make_plan
from roi_lightning.learning.losses import objective
from roi_lightning.learning.memory_tracker import step_bytes
from roi_lightning.learning.roi import RoILightningModule
from roi_lightning.models.config import compute_dtype
from roi_lightning.samplers import Categorical
from roi_lightning.samplers.schedules import Exponential

lab = pytest.fixture(make_lab)
PARTS = {"weights", "logits", "gradients", "optimizer", "masked_weights", "activations", "loss", "total"}
PARTS |= {"process"}
# No gradient goes on from these, so that their weights are not kept for the backward pass.
FIRST = re.compile(r".*\.0\.(self_attn\.[qkv]_proj|attn\.c_attn)")


@pytest.mark.slow
def test_the_docs_show_what_plan_says(tmp_path, capsys):
    architecture("Qwen/Qwen2.5-0.5B").save_pretrained(tmp_path / "qwen2.5-0.5b")
    page = (Path(__file__).parents[2] / "docs/training.md").read_text()
    command, said = page.split("plan --config qwen0.5b_2of4.yaml --fit_in", 1)[1].split("```", 3)[::2][:2]
    model = ["--model.lm", tmp_path / "qwen2.5-0.5b"]
    assert run("plan", "--config", "qwen0.5b_2of4.yaml", *model, "--fit_in", *command.split()) == 0
    shown = plain_text(capsys.readouterr().out)
    rows = [plain_text(line) for line in said.splitlines() if line.startswith(("│", "  --"))]
    # What this process takes by itself differs from machine to machine.
    rows = [row for row in rows if re.search(r"\d", row) and "libraries" not in row]
    assert len(rows) >= 15
    for row in rows:
        assert row in shown, row


@pytest.mark.parametrize(
    ("builder", "dtype"), [(tiny_qwen2, "auto"), (tiny_gpt2, "float32"), (tiny_qwen2, "float16")]
)
def test_bytes_are_those_of_real_tensors(lab, builder, dtype, half_width):
    half_width(True)
    model = builder(lab.folder / "m")
    lm = AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
    plan = make_plan(["--config", "quickstart.yaml", *lab.options(model=model), "--model.dtype", dtype])
    learner, trainer = lab.learn(1, model=model, dtype=dtype)
    weights = {p.data_ptr(): p.numel() * p.element_size() for p in lm.parameters()}
    assert plan["bytes"]["weights"] == sum(weights.values())
    logits = [layer.learned["logits"] for layer in learner.tensors.values()]
    assert plan["logits"] == sum(x.numel() for x in logits)
    assert plan["bytes"]["logits"] == sum(x.numel() * x.element_size() for x in logits)
    state = [x for per in trainer.optimizers[0].state.values() for x in per.values() if x.ndim]
    assert plan["bytes"]["optimizer"] == sum(x.numel() * x.element_size() for x in state)
    masked = [tensor.student for tensor in learner.tensors.values()]
    assert plan["bytes"]["masked_weights"] == sum(x.numel() * x.element_size() for x in masked)
    assert plan["tokens"] == 4 * 2 * 32
    assert plan["bytes"].keys() == PARTS


def test_what_each_of_several_devices_keeps(lab, half_width):
    half_width(True)
    command = ["--config", "quickstart.yaml", *lab.options(), "--trainer.devices", "4"]
    assert make_plan([*command, "--config", "overlays/ddp.yaml"])["spread"] is None
    command += ["--config", "overlays/fsdp2.yaml", "--trainer.devices", "4", "--trainer.num_nodes", "2"]
    plan = make_plan(command)
    lm = AutoModelForCausalLM.from_pretrained(lab.model)
    # bf16 weights of two models; logits, their gradients and AdamW's two moments in fp32; everything in eighths.
    weights = 2 * lm.num_parameters() * lm.dtype.itemsize
    assert plan["spread"] == round((weights + 16 * plan["prunable"]) / 8)


def test_plan_reads_no_weight(lab, monkeypatch):
    for name in ("load_file", "safe_open"):
        monkeypatch.setattr(f"safetensors.torch.{name}", lambda *a, **k: pytest.fail("read weights"))
    (lab.folder / "m").mkdir()
    (lab.folder / "m" / "config.json").write_text((lab.model / "config.json").read_text())
    assert make_plan(["--config", "quickstart.yaml", *lab.options(model=lab.folder / "m")])["prunable"] > 0
    assert torch.get_default_dtype() == torch.float32


# What a step holds, against what a real one allocates.


@pytest.fixture(scope="module")
def wide_llama(tmp_path_factory):
    """Large enough for its activations to outweigh what a sampler works with."""
    sizes = {
        "hidden_size": 256,
        "intermediate_size": 768,
        "vocab_size": 8192,
        "max_position_embeddings": 2048,
    }
    folder = tmp_path_factory.mktemp("wide")
    return str(tiny_llama(folder, **sizes, tie_word_embeddings=True, dtype=torch.bfloat16))


SETTINGS = [{}, {"distillation": 0.5}, {"activation_checkpointing": True}, {"sampler": Categorical()}]
SETTINGS += [{"lr_weights": 1e-3}, {"lr_weights": 1e-3, "activation_checkpointing": True}]
STEPS = [
    pytest.param(settings, more, marks=[] if more and settings == SETTINGS[1] else pytest.mark.slow)
    for settings in SETTINGS
    for more in (True, False)
]


@pytest.mark.parametrize(
    ("settings", "accumulating"),
    STEPS,
    ids=lambda value: next(iter(value), "plain") if isinstance(value, dict) else None,
)
def test_a_step_holds_what_was_planned(wide_llama, settings, accumulating):
    learner = RoILightningModule(
        wide_llama, lam=Exponential(0.01, 0.002), tau=Exponential(0.5, 0.05), **settings
    )
    dtype = compute_dtype(torch.bfloat16, torch.device("cpu"))
    planned = step_bytes(learner, dtype, (8, 256), accumulating, learner.activation_checkpointing)
    teacher, student = learner.models()
    draw(learner)
    ids = torch.arange(8 * 256).view(8, 256)

    def step():
        objective(student, teacher, ids, learner.distillation)[0].backward()

    step()
    there = sum(p.numel() * p.element_size() for p in learner.parameters())
    if accumulating:
        there += sum(p.numel() * p.element_size() for p in learner.learned)
    else:
        learner.zero_grad()
    assert planned.peak == pytest.approx(there + peak_bytes(step, torch.device("cpu")), rel=0.06)


# Making it fit.


@pytest.mark.parametrize(
    ("text", "size"), [("80GB", 80e9), ("22GiB", 22 * 2**30), ("1.5 gb", 1.5e9), ("4096", 4096)]
)
def test_sizes(text, size):
    assert parse_size(text) == size


@pytest.mark.slow
def test_the_gentlest_way_that_fits_is_told(lab, wide_llama, capsys, half_width):
    half_width(True)  # as the GPU that --fit_in asks about
    base = ["--config", "quickstart.yaml", *lab.options(model=wide_llama)]
    base += ["--data.batch_size", "8", "--data.seq_len", "256"]
    out, totals = lab.folder / "plan.json", []
    for size in ("1GB", "190MB", "120MB", "65MB"):
        assert run("plan", *base, "--fit_in", size, "--json", out) == 0
        found = json.loads(out.read_text())["fit_in"]
        last = found["tried"][-1]
        totals.append(last["bytes"])
        if not last["eight_bit"]:
            assert make_plan([*base, *found["arguments"]])["bytes"]["total"] == last["bytes"]
        assert last["bytes"] <= 0.95 * found["limit"]
        assert all(way["bytes"] > 0.95 * found["limit"] for way in found["tried"][:-1])
    assert totals == sorted(totals, reverse=True)
    assert "add to the command line" in plain_text(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("accumulate", "more"),
    [
        ("null", ("--data.windows_per_step", "16", "--trainer.validate_every_steps", "2")),
        (2, ("--trainer.val_check_interval", "4")),
    ],
)
def test_what_fits_learns_from_as_many_windows_and_validates_as_often(lab, accumulate, more, half_width):
    half_width(True)  # as the GPU that --fit_in asks about
    base = [
        "--config",
        "quickstart.yaml",
        *lab.options(accumulate=accumulate),
        "--data.batch_size",
        "8",
        *more,
    ]
    out, configured = lab.folder / "plan.json", make_plan(base)
    # Not counted on to the last byte, so that it does not fit as it is.
    assert run("plan", *base, "--fit_in", str(configured["bytes"]["total"]), "--json", out) == 0
    added = json.loads(out.read_text())["fit_in"]["arguments"]
    assert added[:2] == ["--data.batch_size", "4"]
    smaller = make_plan([*base, *added])
    for plan in (configured, smaller):
        assert (plan["windows_per_step"], plan["validate_every_steps"]) == (16, 2)
    assert smaller["micro_batches"] == 2 * configured["micro_batches"] == 4
