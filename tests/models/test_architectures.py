"""Every supported architecture, from its layers to the logits of the exported directory in a fresh process."""

import re
import subprocess
import sys
from functools import partial

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from safetensors.torch import load_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DeepseekV3Config,
    MixtralConfig,
    OlmoeConfig,
    PhimoeConfig,
)
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from benchmarks.speed.timing import peak_bytes
from helpers.directories import tensors_of
from helpers.lab import draw, make_lab, run
from helpers.tiny_models import (
    tiny_gemma2,
    tiny_gemma3,
    tiny_gguf_moe,
    tiny_gpt2,
    tiny_gpt_oss,
    tiny_llama,
    tiny_mistral,
    tiny_mixtral,
    tiny_opt,
    tiny_phi3,
    tiny_qwen2,
    tiny_qwen2_moe,
    tiny_qwen3,
    tiny_qwen3_moe,
)
from roi_lightning.errors import UserError
from roi_lightning.learning.callbacks import HardenMasks, SparseExport
from roi_lightning.learning.losses import next_token_nll
from roi_lightning.learning.memory_tracker import step_bytes
from roi_lightning.learning.roi import RoILightningModule
from roi_lightning.masks.mask_set import MaskSet
from roi_lightning.models import layers
from roi_lightning.models.fingerprint import apply_masks
from roi_lightning.models.layers import prunable_layers, stored_weights
from roi_lightning.models.loading import freeze, load_language_model
from roi_lightning.models.source import resolve_model

lab = pytest.fixture(make_lab)

# What is masked of a block, by the names on disk; written by hand.
ATTENTION = {f"self_attn.{name}_proj" for name in "qkvo"}
GATED = ATTENTION | {f"mlp.{name}_proj" for name in ("gate", "up", "down")}
BLOCKS = {
    "llama": (tiny_llama, "model.layers", GATED),
    "qwen2": (partial(tiny_qwen2, dtype=torch.float32), "model.layers", GATED),
    "qwen3": (tiny_qwen3, "model.layers", GATED),
    "gemma2": (tiny_gemma2, "model.layers", GATED),
    "gemma3": (tiny_gemma3, "model.layers", GATED),
    "mistral": (tiny_mistral, "model.layers", GATED),
    "phi3": (
        tiny_phi3,
        "model.layers",
        {"self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"},
    ),
    "gpt2": (tiny_gpt2, "transformer.h", {"attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"}),
    "opt": (
        tiny_opt,
        "model.decoder.layers",
        {*(f"self_attn.{name}_proj" for name in ("q", "k", "v", "out")), "fc1", "fc2"},
    ),
    "mixtral": (
        tiny_mixtral,
        "model.layers",
        ATTENTION | {f"block_sparse_moe.experts.{i}.{name}" for i in range(4) for name in ("w1", "w2", "w3")},
    ),
    "qwen3_moe": (
        tiny_qwen3_moe,
        "model.layers",
        ATTENTION | {f"mlp.experts.{i}.{name}_proj" for i in range(4) for name in ("gate", "up", "down")},
    ),
}
MIXTURES = {"mixtral": tiny_mixtral, "qwen3_moe": tiny_qwen3_moe, "qwen2_moe": tiny_qwen2_moe}
RELOADER = """
import sys, torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM
torch.set_num_threads(1)
for line in sys.stdin:
    folder, ids, out = line.strip().split("\\t")
    lm = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        save_file({"logits": lm(torch.tensor([list(map(int, ids.split()))])).logits}, out)
    print("done", flush=True)
"""


@pytest.fixture(scope="module")
def reloaded(tmp_path_factory):
    """Logits of a directory by transformers alone, in a process that has never seen this package."""
    options = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", RELOADER], **options) as process:

        def logits(folder, ids):
            out = tmp_path_factory.mktemp("reloaded") / "logits.safetensors"
            print(
                folder.absolute(),
                " ".join(map(str, ids.tolist())),
                out,
                sep="\t",
                file=process.stdin,
                flush=True,
            )
            assert process.stdout.readline() == "done\n"
            return load_file(out)["logits"]

        yield logits
        process.stdin.close()


def load(path):
    return load_language_model(resolve_model(str(path)))


@pytest.mark.parametrize("architecture", BLOCKS)
def test_learned_exported_and_read_by_transformers(lab, reloaded, architecture):
    build, blocks, layers = BLOCKS[architecture]
    model = build(lab.folder / "m")
    trainer = {"default_root_dir": str(lab.folder / "run"), "gradient_clip_val": 1.0}
    learner, _ = lab.learn(3, model, callbacks=[HardenMasks(), SparseExport()], trainer=trainer)
    export = lab.folder / "run" / "export"
    for base in ([], ["--base", model]):
        assert run("verify", export, *base) == 0

    ids = torch.randint(0, 250, (40,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        wanted = learner.harden()(input_ids=ids[None]).logits
        assert torch.equal(reloaded(export, ids), wanted)
        by_layer = learner.harden(dict(learner.hard_masks()))
        assert torch.equal(by_layer(input_ids=ids[None]).logits, wanted)
        assert not torch.allclose(learner.teacher(input_ids=ids[None]).logits, wanted, atol=1e-3)

    before, after = tensors_of(model), tensors_of(export)
    depth = AutoConfig.from_pretrained(model).num_hidden_layers
    masked = {f"{blocks}.{i}.{layer}.weight" for i in range(depth) for layer in layers}
    assert MaskSet.load(export).layers.keys() == masked
    for name, tensor in after.items():
        if name in masked:
            rows = tensor.T if architecture == "gpt2" else tensor
            assert ((rows.reshape(len(rows), -1, 4) != 0).sum(-1) == 2).all(), name
            assert torch.equal(tensor[tensor != 0], before[name][tensor != 0])
        else:
            assert torch.equal(tensor, before[name]), name
    assert before.keys() == after.keys()
    routers = {name for name in before if name.endswith(".gate.weight")}
    assert len(routers) == (depth if architecture in MIXTURES else 0)
    assert not routers & masked


# Experts: as transformers computes them, by the names on disk.


@pytest.fixture(params=MIXTURES)
def mixture(request, tmp_path):
    return MIXTURES[request.param](tmp_path / "m")


def test_the_names_of_all_layers_are_on_disk_and_hold_what_is_there(mixture):
    lm, stored = load(mixture), tensors_of(mixture)
    names = stored_weights(resolve_model(str(mixture)), lm, layers := prunable_layers(lm))
    for name, on_disk in names.items():
        assert torch.equal(layers[name].of(lm), stored[on_disk]), name
    matrices = {n for n, x in stored.items() if ".layers." in n and x.ndim == 2}
    left = {re.sub(r".*\.\d+\.\w+\.", "", name) for name in matrices - set(names.values())}
    assert left <= {"gate.weight", "shared_expert_gate.weight"}


SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_experts_per_tok": 2,
    "vocab_size": 64,
    "pad_token_id": 0,
}
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
OTHERS = {
    "olmoe": OlmoeConfig(**SMALL, num_experts=4),
    "phimoe": PhimoeConfig(**SMALL, num_local_experts=4),
    "deepseek_v3": DeepseekV3Config(
        **SMALL, **LATENT, n_routed_experts=4, n_group=1, topk_group=1, first_k_dense_replace=1
    ),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_mixtures_that_nothing_here_names_are_known_by_transformers_own_rules(kind, tmp_path):
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(OTHERS[kind]).save_pretrained(tmp_path)
    lm, stored = load(tmp_path), tensors_of(tmp_path)
    layers = prunable_layers(lm)
    assert sum(".experts." in name for name in layers) == 4 * 3 * (1 if kind == "deepseek_v3" else 2)
    names = stored_weights(resolve_model(str(tmp_path)), lm, layers)
    assert all(torch.equal(layers[name].of(lm), stored[on_disk]) for name, on_disk in names.items())
    assert not any(re.search(r"\.(gate|router)\.", name) for name in names.values())


NOISY = {
    "mixtral": MixtralConfig(**SMALL, num_local_experts=4, router_jitter_noise=0.5),
    "phimoe": PhimoeConfig(**SMALL, num_local_experts=4, router_jitter_noise=0.5, input_jitter_noise=0.5),
}


@pytest.mark.parametrize("kind", NOISY)
def test_routes_are_those_of_evaluation(kind):
    """PhiMoE draws its experts in train mode, both stir what they route; trained weights are to meet neither."""
    torch.manual_seed(0)
    lm = AutoModelForCausalLM.from_config(NOISY[kind])
    ids = torch.randint(0, 64, (2, 20))
    wanted = lm.eval()(ids).logits
    lm.train()
    assert not torch.equal(lm(ids).logits, lm(ids).logits), "there was no noise to turn off"
    freeze(lm)
    assert all(module.training for module in lm.modules())
    assert all(torch.equal(lm(ids).logits, wanted) for _ in range(3))
    assert all(module.training for module in lm.modules())


def test_experts_of_a_gguf_file(lab, reloaded):
    model, out = tiny_gguf_moe(lab.folder / "m.gguf"), lab.folder / "out"
    text = ["--corpora", lab.corpus, "--windows", 3, "--seq_len", 32, "--dtype", "float32"]
    assert run("prune", model, "--method", "sparsegpt", "--mask_only", *text, "--out", out) == 0
    assert run("verify", out, "--base", model) == 0
    masks, ids = MaskSet.load(out), torch.arange(30)
    assert len([name for name in masks.layers if ".experts." in name]) == 2 * 4 * 3
    lm = load_language_model(resolve_model(str(model)), "float32")
    apply_masks(lm, masks)
    with torch.no_grad():
        assert torch.equal(reloaded(out, ids), lm(ids[None]).logits)


# Experts that no token is sent to.


def few_tokens(lab, **options):
    """Windows of eight tokens for two of sixteen experts each: at least eight are idle in every step."""
    trainer = {"gradient_clip_val": 1.0} | options.pop("trainer", {})
    return lab.learn(data=lab.data(seq_len=4, batch_size=1), trainer=trainer, **options)[0]


def test_idle_experts_keep_their_logits(lab):
    model = tiny_qwen3_moe(lab.folder / "m", num_experts=16)
    start = RoILightningModule(str(model))
    start.configure_model()
    start.start.initialise(start, start.sampler)
    learner = few_tokens(lab, model=model, max_steps=1)
    moved = set()
    for name, tensor in learner.tensors.items():
        before, after = (
            x.tensors[name].whole("logits").view(-1, *tensor.shape[-2:]) for x in (start, learner)
        )
        moved |= {
            layer for layer, a, b in zip(tensor.layers, before, after, strict=True) if not torch.equal(a, b)
        }
    experts = {name for name in learner.layers if ".experts." in name}
    assert learner.layers.keys() - experts <= moved
    for block in ("layers.0", "layers.1"):
        mine = {name for name in experts & moved if block in name}
        assert 0 < len(mine) <= 8 * 3, "four tokens, two experts each"


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
def test_a_run_with_idle_experts_resumes_to_the_same_bits_recomputed_or_not(lab):
    steps = {"model": tiny_mixtral(lab.folder / "m", num_local_experts=16), "max_steps": 4}
    keep = ModelCheckpoint(lab.folder / "kept", "{step}", every_n_train_steps=2, save_top_k=-1)
    kept = {"callbacks": [keep], "trainer": {"enable_checkpointing": True}}
    whole = few_tokens(lab, **steps, **kept, activation_checkpointing=True)
    resumed = few_tokens(lab, **steps, ckpt_path=str(lab.folder / "kept" / "step=2.ckpt"))
    for name, tensor in whole.tensors.items():
        assert torch.equal(tensor.whole("logits"), resumed.tensors[name].whole("logits")), name


@pytest.mark.parametrize("method", ["wanda", pytest.param("sparsegpt", marks=pytest.mark.slow)])
def test_experts_that_meet_no_token_are_pruned_by_magnitude(lab, method):
    model, out = tiny_qwen3_moe(lab.folder / "m", num_experts=16), lab.folder / "out"
    text = ["--corpora", lab.corpus, "--windows", 1, "--seq_len", 4]
    with pytest.warns(UserWarning, match=r"\d+ of 96 layers of experts met no token.*by magnitude") as told:
        assert run("prune", model, "--method", method, *text, "--out", out) == 0
    (line,) = {str(warning.message) for warning in told}
    idle = int(line.split()[0])
    assert 2 * 8 * 3 <= idle < 96
    assert run("verify", out, "--base", model) == 0
    assert run("prune", model, "--method", "magnitude", "--out", lab.folder / "plain") == 0
    masks, plain = MaskSet.load(out), MaskSet.load(lab.folder / "plain")
    same = {n for n, x in masks.layers.items() if torch.equal(x.packed, plain.layers[n].packed)}
    assert len(same) == idle
    assert re.search(r"magnitude, (\S+) first", line)[1] + ".weight" in same


# Planning.


@pytest.mark.parametrize("checkpointing", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_step_of_a_mixture_holds_what_was_planned(tmp_path, checkpointing):
    """Planned with as many tokens for every expert; a real step has the router's choices."""
    sizes = {"hidden_size": 128, "intermediate_size": 512, "max_position_embeddings": 256}
    model = tiny_mixtral(tmp_path / "m", num_local_experts=8, **sizes)
    learner = RoILightningModule(str(model), activation_checkpointing=checkpointing)
    planned = step_bytes(learner, torch.float32, (8, 256), False, checkpointing)
    _, student = learner.models()
    draw(learner)
    ids = torch.randint(0, 250, (8, 256))

    def step():
        next_token_nll(student, ids)[0].backward()

    step()
    learner.zero_grad()
    there = sum(p.numel() * p.element_size() for p in learner.parameters())
    assert planned.peak == pytest.approx(there + peak_bytes(step, torch.device("cpu")), rel=0.06)


# Layouts that nobody here knows.


@pytest.fixture
def forgetful():
    """The warning comes once a process; here every test is one."""
    layers._warn.cache_clear()
    yield
    layers._warn.cache_clear()


@pytest.mark.usefixtures("forgetful")
def test_what_is_not_known_stays_dense_and_is_listed_once(lab):
    model, out = tiny_gpt_oss(lab.folder / "m"), lab.folder / "out"
    with pytest.warns(UserWarning, match="matrices of a layout that is not known, which stay dense") as told:
        assert run("prune", model, "--method", "magnitude", "--out", out) == 0
    (line,) = [str(warning.message) for warning in told]
    stacks = ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias")
    assert line.partition("dense: ")[2].split(", ") == [
        f"model.layers.*.mlp.experts.{name}" for name in stacks
    ]
    assert run("verify", out, "--base", model) == 0
    assert {name.split(".")[3] for name in MaskSet.load(out).layers} == {"self_attn"}


@pytest.mark.usefixtures("forgetful")
def test_experts_with_a_gate_of_their_own_stay_dense(tmp_path, monkeypatch):
    model = tiny_mixtral(tmp_path / "m")
    monkeypatch.setattr(MixtralExperts, "_apply_gate", lambda self, both: both.chunk(2, -1)[1])
    with pytest.warns(UserWarning, match="has 4 matrices .*experts.gate_up_proj, .*experts.down_proj$"):
        assert len(prunable_layers(load(model))) == 2 * 4


def test_experts_stacked_on_disk_are_refused_before_work(lab, capsys):
    model = tiny_mixtral(lab.folder / "m")
    stacked = lab.folder / "stacked"
    AutoModelForCausalLM.from_pretrained(model).save_pretrained(stacked, save_original_format=False)
    for file in model.glob("tokenizer*"):
        (stacked / file.name).write_bytes(file.read_bytes())
    assert run("prune", stacked, "--method", "magnitude", "--out", lab.folder / "out") == 1
    assert re.search(r"experts\.0\.w1\.weight.*ignore", capsys.readouterr().err)
    assert not (lab.folder / "out").exists()
    ignored = ["--ignore", "experts.*"]
    assert run("prune", stacked, "--method", "magnitude", *ignored, "--out", lab.folder / "out") == 0


def test_routers_that_are_linear_layers_are_not_pruned(tmp_path):
    lm = load(tiny_qwen2_moe(tmp_path / "m"))
    gate = lm.model.layers[0].mlp.shared_expert_gate
    assert isinstance(gate, torch.nn.Linear)
    assert "model.layers.0.mlp.shared_expert_gate" not in prunable_layers(lm)
    with pytest.raises(UserError, match="'shared_expert_gate' matches none"):
        prunable_layers(lm, ["shared_expert_gate"])
