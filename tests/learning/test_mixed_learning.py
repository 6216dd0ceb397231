"""Runs with mixed patterns: what is learned, resumed, exported and planned; what is refused."""

import re

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from transformers import AutoModelForCausalLM

from helpers.lab import GOING_ON, make_lab
from roi_lightning.api import prune
from roi_lightning.contrib.proxsparse import ProxSparseModule
from roi_lightning.errors import UserError
from roi_lightning.export.verify import verify_export
from roi_lightning.learning.callbacks import HardenMasks
from roi_lightning.learning.callbacks.summary import _zero_fractions
from roi_lightning.learning.memory_plan import Planner
from roi_lightning.learning.roi import RoILightningModule
from roi_lightning.masks.mask_set import MaskSet
from roi_lightning.models.source import resolve_model

lab = pytest.fixture(make_lab)
pytestmark = [*GOING_ON, pytest.mark.filterwarnings("ignore:the first draws keep")]
PATTERNS = {"down_proj": "4:8", "k_proj": "dense", "model.layers.1.mlp.down_proj": "1:4"}
LABEL = "1:4 + 2:4 + 4:8 + dense"
# Of the lab's model: its weights, and the share of them that stays.
KINDS = {"q_proj": 64 * 64, "k_proj": 32 * 64, "v_proj": 32 * 64, "o_proj": 64 * 64}
KINDS |= {"gate_proj": 64 * 128, "up_proj": 64 * 128, "down_proj": 64 * 128}
PRUNABLE = 2 * sum(KINDS.values())
KEPT = PRUNABLE // 2 + KINDS["k_proj"] - KINDS["down_proj"] // 4


def learn(lab, name, **options):
    checkpoints = ModelCheckpoint(
        lab.folder / name / "checkpoints", "{step}", every_n_train_steps=2, save_top_k=-1
    )
    trainer = {"default_root_dir": str(lab.folder / name), "enable_checkpointing": True}
    options = {"patterns": PATTERNS, "prior": "magnitude"} | options
    return lab.learn(4, callbacks=[HardenMasks(), checkpoints], trainer=trainer, **options)


def test_a_run_resumes_to_the_same_bits_and_exports_what_verifies(lab):
    whole, trainer = learn(lab, "whole")
    checkpoint = str(lab.folder / "whole" / "checkpoints" / "step=2.ckpt")
    resumed, _ = learn(lab, "whole", ckpt_path=checkpoint)
    assert all(
        torch.equal(x.learned["logits"], resumed.tensors[name].learned["logits"])
        for name, x in whole.tensors.items()
    )
    masks = MaskSet.load(lab.folder / "whole" / "mask.safetensors")
    magnitude = prune(
        AutoModelForCausalLM.from_pretrained(lab.model), method="magnitude", patterns=PATTERNS
    ).masks
    # The same patterns, or this would be refused; and something was learned.
    assert 0.5 < masks.overlap(magnitude).all < 1
    assert (str(masks.pattern), list(masks.dense.values())) == (LABEL, 2 * [KINDS["k_proj"]])
    assert whole.kept_of_prunable == (KEPT, PRUNABLE) == (masks.kept + 4096, masks.total + 4096)
    assert whole.mixed_patterns == {"mixed_patterns": {"kept": KEPT, "prunable": PRUNABLE}}
    assert _zero_fractions(whole)["prunable"] == (PRUNABLE - KEPT) / PRUNABLE
    assert whole.recipe()["model.patterns"][0] == "*: 2:4"

    again = RoILightningModule(str(lab.model), patterns=PATTERNS, prior="magnitude")
    last = str(lab.folder / "whole" / "checkpoints" / "step=4.ckpt")
    trainer.export(again, "out", ckpt_path=last, allow_changed_settings=True)
    assert verify_export(lab.folder / "out", resolve_model(str(lab.model))).ok
    # As many of each pattern, on other layers.
    moved = {"down_proj": "1:4", "k_proj": "dense", "model.layers.1.mlp.down_proj": "4:8"}
    for patterns, says in (
        (moved, "other patterns than model.patterns"),
        ({}, f"holds a {re.escape(LABEL)} run"),
    ):
        other = RoILightningModule(str(lab.model), patterns=patterns, prior="magnitude")
        with pytest.raises(UserError, match=says):
            trainer.export(other, "other", ckpt_path=last, allow_changed_settings=True)
    with pytest.raises(UserError, match=r"model\.patterns"):
        learn(lab, "whole", ckpt_path=checkpoint, patterns=moved)


def test_a_prior_is_a_mask_of_the_same_patterns_layer_by_layer(lab):
    lm = AutoModelForCausalLM.from_pretrained(lab.model)
    prune(lm, method="magnitude", patterns=PATTERNS).masks.save(lab.folder / "mask")
    learner, _ = lab.learn(1, patterns=PATTERNS, prior=str(lab.folder / "mask"))
    assert learner.prior_masks.keys() == learner.tensors.keys()
    swapped = PATTERNS | {"down_proj": "1:4", "model.layers.1.mlp.down_proj": "4:8"}
    with pytest.raises(UserError, match=r"down_proj.weight' at 4:8 and the run at 1:4"):
        lab.learn(1, patterns=swapped, prior=str(lab.folder / "mask"))


def test_a_plan_counts_what_is_kept_and_learned(lab):
    planner = Planner(RoILightningModule(str(lab.model), patterns=PATTERNS))
    assert (str(planner.chosen.pattern), planner.prunable, planner.chosen.kept) == (LABEL, PRUNABLE, KEPT)
    assert (planner.layers, planner.learned) == (14, PRUNABLE - 2 * KINDS["k_proj"])


def test_proxsparse_leaves_layers_dense(lab):
    learner = ProxSparseModule(str(lab.model), strength=1.0, patterns={"k_proj": "dense"})
    assert str(learner.mask_set().pattern) == "2:4 + dense"
