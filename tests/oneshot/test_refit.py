"""Refit against weighted least squares, and against whole forward passes of the model that it leaves."""

import json

import pytest
import torch
from safetensors.torch import load_file
from test_hyperprune import linear_block
from transformers import AutoModelForCausalLM

from cli_helpers import make_lab, run
from roi_lightning.export import write_export
from roi_lightning.export.recorded import recorded_layers
from roi_lightning.export.sidecar import read_sidecar
from roi_lightning.masks.layer_mask import LayerMask
from roi_lightning.masks.mask_set import MaskSet
from roi_lightning.masks.pattern import NMPattern
from roi_lightning.models.loading import load_language_model
from roi_lightning.models.source import resolve_model
from roi_lightning.oneshot import Calibration, Refit, Wanda, prune_layers
from tiny_models import random_masks, tiny_gpt2, tiny_llama, tiny_mixtral, tiny_qwen2

lab = pytest.fixture(make_lab)


def weighted_least_squares(inputs, weight, mask):
    """Kept weights of least mean of error over what the dense layer adds, token by token; in closed form."""
    x = inputs.flatten(0, 1).double()
    wanted = x @ weight.double().T
    scale = wanted.square().sum(1, keepdim=True).rsqrt()
    rows = torch.zeros(weight.shape, dtype=torch.double)
    for row, kept in enumerate(mask):
        rows[row, kept] = torch.linalg.lstsq(x[:, kept] * scale, wanted[:, row, None] * scale).solution[:, 0]
    return rows


def test_a_linear_block_comes_to_the_least_squares_solution():
    block, inputs, weight = linear_block("2:4", copies=8)
    (name, layer), *_ = block.layers.items()
    mask = Wanda().prune(weight, layer.inputs, layer.pattern, name).mask
    masks = {name: LayerMask.from_bool(mask, transposed=False)}
    method = Refit(masks, lambda _: weight.masked_fill(~mask, 0), part_steps=400, lr=3e-2)
    method.start(0)
    method.learn(block)
    fitted = method.prune(weight, layer.inputs, layer.pattern, name)
    assert torch.equal(fitted.mask, mask)
    wanted = weighted_least_squares(inputs, weight, mask)
    assert torch.allclose(fitted.weight.double(), wanted, atol=2e-3)
    assert not torch.allclose(weight * mask, wanted.float(), atol=0.05)
    before, after = method.errors[0]
    assert after < before


def test_a_block_that_would_be_worse_keeps_its_weights():
    block, inputs, weight = linear_block("2:4", copies=8)
    (name, layer), *_ = block.layers.items()
    mask = layer.pattern.top(weight.abs())
    best = weighted_least_squares(inputs, weight, mask).float()
    method = Refit({name: LayerMask.from_bool(mask, transposed=False)}, lambda _: best, part_steps=1, lr=1.0)
    method.start(0)
    method.learn(block)
    assert method.errors[0][1] > method.errors[0][0]
    assert torch.equal(method.prune(weight, layer.inputs, layer.pattern, name).weight, best)


def errors_of(dense, pruned, windows):
    """Block by block in the model as it was left: what the dense block makes of the pruned one's input."""
    found = []
    blocks = [x.model.layers if hasattr(x, "model") else x.transformer.h for x in (dense, pruned)]
    for mine, theirs in zip(*blocks, strict=True):
        each = []

        def compare(_block, args, kwargs, output, mine=mine, each=each):
            wanted, given = mine(*args, **kwargs), args[0]
            wanted, output = (x if isinstance(x, torch.Tensor) else x[0] for x in (wanted, output))
            added = (wanted - given).square().sum(-1)
            each.append(((output - wanted).square().sum(-1) / added).mean())

        handle = theirs.register_forward_hook(compare, with_kwargs=True)
        with torch.no_grad():
            for window in windows:
                pruned(input_ids=window[None], use_cache=False)
        handle.remove()
        found.append(float(torch.stack(each).mean()))
    return found


@pytest.mark.parametrize("builder", [tiny_llama, tiny_gpt2])
def test_errors_are_those_of_the_model_that_is_left(lab, builder):
    source = resolve_model(str(builder(lab.folder / "base", dtype=torch.float32)))
    export = write_export(source, random_masks(source), lab.folder / "pruned")
    lm = load_language_model(source)
    chosen = recorded_layers(lm, export, read_sidecar(export), source.spec)
    left, given = (AutoModelForCausalLM.from_pretrained(x).eval() for x in (export, export))
    weights = dict(left.named_parameters())
    masks = {name: _mask(MaskSet.load(export), name) for name in chosen.pruned}
    method = Refit(masks, lambda name: weights[f"{name}.weight"].detach().clone(), part_steps=4, lr=1e-3)
    windows = torch.randint(0, 256, (3, 24), generator=torch.Generator().manual_seed(0))
    for name, result in prune_layers(lm, chosen.pruned, method, NMPattern("2:4"), Calibration(windows)):
        assert not result.weight[~result.mask].any()
        weights[f"{name}.weight"].data.copy_(result.weight)
    torch.testing.assert_close(
        [after for _, after in method.errors.values()], errors_of(lm, left, windows), rtol=1e-3, atol=1e-6
    )
    assert method.errors[0][0] == pytest.approx(errors_of(lm, given, windows)[0], rel=1e-3)
    assert all(after < before for before, after in method.errors.values())


def _mask(masks, layer):
    (name,) = [name for name in masks.layers if f"{layer}.weight".endswith(name)]
    return masks.layers[name]


def refit(lab, export, *options):
    text = ["--corpora", lab.corpus, "--windows", 4, "--seq_len", 24, "--steps", 3]
    return run("refit", export, "--out", lab.folder / "out", *text, *options)


@pytest.mark.parametrize("builder", [tiny_qwen2, tiny_gpt2])
def test_the_command_writes_an_export_that_verifies(lab, builder, capsys):
    base = builder(lab.folder / "base", dtype=torch.bfloat16)
    source = resolve_model(str(base))
    export = write_export(source, random_masks(source, "4:8"), lab.folder / "pruned")
    assert refit(lab, export, "--seed", 2) == 0
    out = lab.folder / "out"
    assert "error before" in capsys.readouterr().out
    assert run("verify", out, "--base", base) == 0
    masks, before, after = MaskSet.load(out), *(load_file(x / "model.safetensors") for x in (export, out))
    assert masks.updated.keys() == masks.layers.keys()
    for name, tensor in after.items():
        assert torch.equal(tensor, before[name]) == (name not in masks.layers), name
        if name in masks.layers:
            mask = masks.layers[name].to_bool()
            assert torch.equal(mask, MaskSet.load(export).layers[name].to_bool())
            assert not tensor[~mask].any()
    training = json.loads((out / "roi_sparsity.json").read_text())["training"]
    wanted = {"method": "refit", "part_steps": 3, "seed": 2, "windows": 4, "lr": 3e-4, "tokens": 96}
    assert wanted.items() <= training.items()
    again = ["--windows", 2, "--seq_len", 8, "--steps", 1, "--out", lab.folder / "again"]
    assert run("refit", out, "--corpora", lab.corpus, *again) == 0, "from weights that are updated already"


def test_experts_that_no_token_reaches_stay_as_they_are(lab):
    base, export = tiny_mixtral(lab.folder / "base"), lab.folder / "pruned"
    assert run("prune", base, "--method", "magnitude", "--out", export) == 0
    few = ["--corpora", lab.corpus, "--windows", 1, "--seq_len", 2, "--steps", 2]
    with pytest.warns(UserWarning, match="met no token of the calibration text and stay as they are"):
        assert run("refit", export, "--out", lab.folder / "out", *few) == 0
    assert run("verify", lab.folder / "out", "--base", base) == 0
    before, after = (load_file(x / "model.safetensors") for x in (export, lab.folder / "out"))
    same = {name: torch.equal(before[name], after[name]) for name in MaskSet.load(export).layers}
    assert all("experts" in name for name, equal in same.items() if equal)
    assert {True, False} == set(same.values())


def test_what_was_learned_as_a_whole_is_refitted_with_a_warning(lab):
    source = resolve_model(str(tiny_qwen2(lab.folder / "base")))
    learned = {"learner": "RoILightningModule"}
    export = write_export(source, random_masks(source), lab.folder / "learned", training=learned)
    with pytest.warns(UserWarning, match="such a mask was worse afterwards.*compare the two with evaluate"):
        assert refit(lab, export) == 0


def spoiled(lab):
    """What can't be refitted, and words of the error."""
    base = tiny_qwen2(lab.folder / "base")
    source = resolve_model(str(base))
    export = write_export(source, random_masks(source), lab.folder / "pruned")
    other = tiny_qwen2(lab.folder / "other", seed=1)
    wide = tiny_qwen2(lab.folder / "wide", hidden_size=128)
    yield base, [], "is no exported directory"
    yield export, ["--base", other], "has other values"
    yield export, ["--base", wide], "name the dense model that it was made from"
    yield export, ["--steps", 0], "--steps is 0; give at least 1"
    yield export, ["--lr", 0], "--lr is 0.0; give a number above 0"
    yield export, ["--lr", 1e30], "infinite or NaN; lower lr"
    yield export, ["--windows", 10**6], "give more text, or lower --windows"


def test_what_can_not_be_refitted_is_refused_and_nothing_is_left(lab, capsys):
    for export, options, says in spoiled(lab):
        assert refit(lab, export, *options) == 1
        error = capsys.readouterr().err
        assert says in error, error
        assert not (lab.folder / "out").exists()
    names = {"base", "pruned", "other", "wide"}
    assert names <= {path.name for path in lab.folder.iterdir()}
