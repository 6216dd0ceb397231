"""Mixed patterns without training: the zeros of each layer, the directory, and what is done with it."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from helpers.directories import reseal
from helpers.lab import brute_top, make_lab, run
from helpers.tiny_models import tiny_gpt2
from roi_lightning.api import apply, prune
from roi_lightning.errors import UserError
from roi_lightning.export.sidecar import read_sidecar
from roi_lightning.masks.mask_set import MaskSet

lab = pytest.fixture(make_lab)
PATTERNS = {"*.down_proj": "4:8", "k_proj": "dense", "model.layers.1.mlp.down_proj": "1:4"}


def expected(name):
    """N and M of a tensor, None where it stays as it is."""
    if name.endswith("down_proj.weight"):
        return (1, 4) if ".1." in name else (4, 8)
    return (2, 4) if re.search(r"layers\.\d.*_proj\.weight$", name) and "k_proj" not in name else None


def test_a_pruned_directory_has_the_zeros_of_every_layers_own_pattern(lab, capsys):
    patterns = json.dumps(PATTERNS)
    assert run("prune", lab.model, "--method", "magnitude", "--patterns", patterns, "--out", "pruned") == 0
    said = capsys.readouterr().out
    before, after = load_file(lab.model / "model.safetensors"), load_file("pruned/model.safetensors")
    kept = prunable = 0
    for name, weight in before.items():
        if expected(name):
            mask = brute_top(weight.float().abs(), *expected(name))
            assert torch.equal(after[name], weight.masked_fill(~mask, 0)), name
        else:
            assert torch.equal(after[name], weight), name
        if name.endswith("_proj.weight"):
            kept += int(mask.sum()) if expected(name) else weight.numel()
            prunable += weight.numel()
    amount = f"{kept:,} of {prunable:,} ({kept / prunable:.1%}, mixed patterns)"
    assert "at 1:4 + 2:4 + 4:8 + dense" in " ".join(said.split()), "where the title wraps depends on the path"
    assert amount in said
    sidecar = read_sidecar(lab.folder / "pruned")
    assert sidecar["pattern"] == "1:4 + 2:4 + 4:8 + dense"
    counts = sidecar["mixed_patterns"]
    assert (counts["kept"], counts["prunable"], len(counts["dense"])) == (kept, prunable, 2)
    card = (lab.folder / "pruned" / "README.md").read_text()
    assert "mixed-patterns" in card
    assert amount in card
    assert re.search(r"\| `down_proj` \| +2 \| +16,384 \| +37\.5% \| +1:4 \+ 4:8 \|", card)

    assert run("verify", "pruned", "--base", lab.model) == 0
    assert amount in capsys.readouterr().out
    assert run("apply", lab.model, "pruned", "--out", "applied") == 0
    assert (lab.folder / "applied/model.safetensors").read_bytes() == (
        lab.folder / "pruned/model.safetensors"
    ).read_bytes()
    assert run("pack", "pruned", "--out", "packed") != 0
    assert "only 2:4 can be packed, beside layers left dense" in capsys.readouterr().err
    sidecar["layers"]["model.layers.0.mlp.up_proj.weight"]["pattern"] = "4:8"
    reseal(lab.folder / "pruned", layers=sidecar["layers"])
    assert run("verify", "pruned") != 0
    assert "different things of" in " ".join(capsys.readouterr().out.split())


def test_layers_left_dense_are_those_that_ignore_leaves_and_pack_leaves_them(lab, capsys):
    common = ["prune", lab.model, "--method", "magnitude", "--out"]
    assert run(*common, "mixed", "--patterns", "{down_proj: dense}") == 0
    assert run(*common, "ignored", "--ignore", "down_proj") == 0
    weights = [(lab.folder / name / "model.safetensors").read_bytes() for name in ("mixed", "ignored")]
    assert weights[0] == weights[1]
    assert run("pack", "mixed", "--out", "packed") == 0
    assert run("verify", "packed", "--base", lab.model) == 0
    capsys.readouterr()
    assert run("compare", "mixed", "ignored", "--out", "compared") != 0
    assert "different patterns can't be compared: 2:4 + dense, 2:4" in capsys.readouterr().err


def test_patterns_in_memory_and_of_transposed_layers(tmp_path):
    lm = AutoModelForCausalLM.from_pretrained(tiny_gpt2(tmp_path / "m", prefix=False))
    masks = prune(lm, method="magnitude", patterns={"c_attn": "dense", "transformer.h.1.*": "4:8"}).masks
    assert {name: str(masks.pattern.of(name)) for name in masks.layers} == {
        name: "4:8" if name.startswith("h.1.") else "2:4" for name in masks.layers
    }
    # The later of two globs that match.
    assert list(masks.dense) == ["h.0.attn.c_attn.weight"]
    masks.check()
    masks.save(tmp_path / "mask")
    assert MaskSet.load(tmp_path / "mask").pattern == masks.pattern
    apply(lm, masks)
    assert (lm.transformer.h[1].attn.c_attn.weight == 0).float().mean() == 0.5


@pytest.mark.parametrize(
    ("patterns", "says"),
    [
        ({"r_proj": "4:8"}, "patterns: 'r_proj' matches none of the 14 linear layers"),
        ({"v_proj": "1:3"}, r"pattern 1:3: model\.layers\.0\.self_attn\.v_proj has 64 inputs"),
        ({"*": "dense"}, "patterns: all 14 layers are left dense"),
    ],
)
def test_patterns_that_do_not_fit_the_model_are_refused(patterns, says, lab):
    lm = AutoModelForCausalLM.from_pretrained(lab.model)
    with pytest.raises(UserError, match=says):
        prune(lm, method="magnitude", patterns=patterns)
