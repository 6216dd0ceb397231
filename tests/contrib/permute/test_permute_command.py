"""`permute` end to end on tiny models: the same function, more kept, `verify` of it and of what is made of it."""

import re
import shutil

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from helpers.directories import add, change, failed, reseal, tensors_of
from helpers.lab import brute_top, make_lab, new_lab, plain_text, run
from helpers.tiny_models import tiny_gpt2
from roi_lightning.contrib.permute.channels import Channels
from roi_lightning.contrib.permute.directory import verify_permuted
from roi_lightning.contrib.permute.permutation import PERMUTATION_FILE, ChannelOrder, Permutation
from roi_lightning.export import verify_export
from roi_lightning.models.source import resolve_model

lab = pytest.fixture(make_lab)


def text(lab):
    return ["--corpora", lab.corpus, "--windows", 3, "--seq_len", 32, "--device", "cpu"]


def permute(lab, model, out, *options):
    return run("permute", model, *text(lab), "--out", out, *options)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A Qwen2 with biases on its values, shared; its permuted directory, and that one pruned by Wanda."""
    shared = new_lab(tmp_path_factory)
    permuted, pruned = shared.folder / "permuted", shared.folder / "pruned"
    assert permute(shared, shared.model, permuted) == 0
    assert run("prune", permuted, "--method", "wanda", *text(shared), "--out", pruned) == 0
    shared.permuted, shared.pruned = permuted, pruned
    return shared


def logits(directory, tokens):
    lm = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    with torch.no_grad():
        return lm(tokens).logits


def assert_same_function(model, permuted):
    tokens = torch.randint(0, 250, (2, 24), generator=torch.Generator().manual_seed(7))
    before, after = logits(model, tokens), logits(permuted, tokens)
    assert (after - before).abs().max() < 1e-5 * before.abs().max()
    names, old, new = Permutation.load(permuted).orders, tensors_of(model), tensors_of(permuted)
    assert names
    assert {n for n in old if not torch.equal(old[n], new[n])} == names.keys()


def test_values_with_biases_move_and_the_function_stays(made):
    assert_same_function(made.model, made.permuted)
    orders = Permutation.load(made.permuted).orders
    assert "model.layers.1.self_attn.v_proj.bias" in orders
    # Two query heads share a head of keys and values, and channels stay in their head.
    values, inputs = (orders[f"model.layers.0.self_attn.{x}_proj.weight"].indices for x in "vo")
    assert torch.equal(values.view(2, 16) // 16, torch.arange(2)[:, None].expand(2, 16))
    assert torch.equal(inputs.view(2, 2, 16) % 16, (values.view(2, 1, 16) % 16).expand(2, 2, 16))


def kept(lab, directory):
    """The share of weight² × input² that 2:4 keeps, by kind of layer, the mean over layers: by the slow way."""
    lm = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    sums = {}

    def observe(name):
        def hook(_layer, inputs):
            sums[name] = sums.get(name, 0) + inputs[0].flatten(0, -2).square().sum(0)

        return hook

    layers = {n: x for n, x in lm.named_modules() if n.endswith(("down_proj", "o_proj"))}
    for name, layer in layers.items():
        layer.register_forward_pre_hook(observe(name))
    with torch.no_grad():
        for window in lab.data(val_corpora=str(lab.corpus)).windows("train", 3):
            lm(window[None])
    shares = {}
    for name, layer in layers.items():
        scores = layer.weight.detach().square() * sums[name]
        share = (scores * brute_top(scores, 2, 4)).sum() / scores.sum()
        shares.setdefault(name.rpartition(".")[2], []).append(float(share))
    return {kind: sum(each) / len(each) for kind, each in shares.items()}


def test_the_table_tells_what_is_kept_before_and_after(made, tmp_path, capsys):
    assert permute(made, made.model, tmp_path / "out") == 0
    shown = plain_text(capsys.readouterr().out)
    before, after = (kept(made, directory) for directory in (made.model, tmp_path / "out"))
    for kind in ("o_proj", "down_proj"):
        cells = re.search(rf"{kind} (\d+) ([\d.]+)% ([\d.]+)% ([\d.]+)%", shown).groups()
        assert cells[0] == "2"
        assert float(cells[1]) == pytest.approx(100 * before[kind], abs=0.02)
        assert float(cells[2]) == pytest.approx(100 * after[kind], abs=0.02)
        assert after[kind] > before[kind] + 0.005
        less = 100 * (after[kind] - before[kind]) / (1 - before[kind])
        assert float(cells[3]) == pytest.approx(less, abs=0.4)
    same = [(each / "model.safetensors").read_bytes() for each in (made.permuted, tmp_path / "out")]
    assert same[0] == same[1], "not the same every time"


def test_gpt2_s_mlp_is_permuted_and_its_attention_left(lab, tmp_path, capsys):
    model = tiny_gpt2(tmp_path / "gpt2", prefix=False)
    assert permute(lab, model, tmp_path / "out") == 0
    assert "transformer.h.*.attn 2 as it was" in plain_text(capsys.readouterr().out)
    assert_same_function(model, tmp_path / "out")
    assert run("verify", tmp_path / "out", "--base", model) == 0
    assert run("prune", tmp_path / "out", "--method", "magnitude", "--out", tmp_path / "pruned") == 0
    assert run("verify", tmp_path / "pruned", "--base", tmp_path / "out") == 0


def test_an_export_verifies_against_the_permuted_model(made, tmp_path):
    original, permuted = resolve_model(str(made.model)), resolve_model(str(made.permuted))
    assert verify_export(made.pruned, permuted).ok
    assert {check.name for check in verify_export(made.pruned, original).failures} >= {"base hashes"}
    assert run("pack", made.pruned, "--out", tmp_path / "packed") == 0
    assert run("verify", tmp_path / "packed", "--base", made.permuted) == 0


def resealed(directory, model):
    """The checks that fail, the sidecar made to fit again as a careless tool might."""
    reseal(directory)
    return failed(verify_permuted(directory, resolve_model(str(model))))


def test_what_was_added_and_hashed_is_noticed(made, tmp_path):
    copy = shutil.copytree(made.permuted, tmp_path / "permuted")
    add(copy, "adapter_config.json")
    assert resealed(copy, made.model) >= {"files", "copied files"}


@pytest.mark.parametrize("name", ["mlp.gate_proj.weight", "self_attn.v_proj.bias", "self_attn.q_proj.weight"])
def test_a_swapped_row_is_noticed(made, tmp_path, name):
    copy = shutil.copytree(made.permuted, tmp_path / "permuted")
    change(copy, f"model.layers.1.{name}", lambda x: torch.cat([x[[1, 0]], x[2:]]))
    assert resealed(copy, made.model) == {"reordered tensors"}


def spoil(kind, orders):
    """Change the orders in one of the ways that a wrong program might."""
    up, down = "model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.down_proj.weight"
    values, inputs = (f"model.layers.0.self_attn.{x}_proj.weight" for x in "vo")
    if kind == "one alone":
        orders[up] = ChannelOrder(0, orders[up].indices.roll(1))
    elif kind == "the consumer left out":
        del orders[down]
    elif kind == "across heads":
        for name in (values, inputs):
            orders[name] = ChannelOrder(orders[name].dim, orders[name].indices.roll(16))
    elif kind == "the other dimension":
        orders[values] = ChannelOrder(1, torch.arange(64))


@pytest.mark.parametrize(
    "kind", ["one alone", "the consumer left out", "across heads", "the other dimension"]
)
def test_orders_that_do_not_belong_together_are_noticed(made, tmp_path, kind):
    """Also where weights, file and sidecar all fit: only the base model's layers say that they can't."""
    copy = shutil.copytree(made.permuted, tmp_path / "out")
    good = Permutation.load(copy)
    orders = dict(good.orders)
    spoil(kind, orders)
    base = type(good.base)(
        good.base.spec, good.base.revision, good.base.dtype, {name: good.base.sha256[name] for name in orders}
    )
    bad = Permutation(good.pattern, orders, base)
    bad.save(copy / PERMUTATION_FILE)
    new = {name: bad.reordered(name, x).contiguous() for name, x in tensors_of(made.model).items()}
    save_file(new, copy / "model.safetensors", {"format": "pt"})
    assert resealed(copy, made.model) == {"channels"}


def test_a_model_that_computes_something_else_is_not_written(made, tmp_path, monkeypatch, capsys):
    """As an architecture would in which more than these layers meets the channels."""
    original = Channels.orders

    def shifted(self, lm, order):
        found = original(self, lm, order)
        return {
            n: ChannelOrder(o.dim, o.indices.roll(1)) if n.endswith("up_proj.weight") else o
            for n, o in found.items()
        }

    monkeypatch.setattr(Channels, "orders", shifted)
    assert permute(made, made.model, tmp_path / "out") == 1
    assert "does not compute the same as before" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
