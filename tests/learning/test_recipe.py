"""A run resumes only itself: what counts as the same run."""

import json
import shutil
from functools import partial

import pytest
import torch

from helpers.lab import QUICK_TRAINER, make_lab
from helpers.text_files import write_jsonl
from roi_lightning.contrib.proxsparse import ProxSparseModule
from roi_lightning.data import Corpus
from roi_lightning.errors import UserError
from roi_lightning.learning.callbacks import HardenMasks, StraightThroughToggle
from roi_lightning.learning.recipe import check_same_run, run_recipe
from roi_lightning.learning.roi import RoILightningModule
from roi_lightning.learning.trainer import RoITrainer
from roi_lightning.samplers import Categorical, GumbelTopK, StraightThrough
from roi_lightning.samplers.schedules import Constant, Exponential

lab = pytest.fixture(make_lab)
adamw = partial(torch.optim.AdamW, lr=1e-2)


def recipe_of(lab, learner=RoILightningModule, trainer=None, data=None, **options):
    settings = {"optimizer": adamw} | options
    made = learner(settings.pop("lm", str(lab.model)), **settings)
    return run_recipe(
        made, RoITrainer(**QUICK_TRAINER | {"max_steps": 5} | (trainer or {})), lab.data(**data or {})
    )


def other_text(lab):
    return {"data": {"corpora": write_jsonl(lab.folder / "other.jsonl", ["other words than those"] * 60)}}


CHANGES = {
    "learner": lambda lab: {"learner": partial(ProxSparseModule, strength=0.1)},
    "sampler": lambda lab: {"sampler": StraightThrough()},
    "the sampler's option": lambda lab: {"sampler": GumbelTopK(push_down="scaled")},
    "parameterisation": lambda lab: {"sampler": Categorical()},
    "tau": lambda lab: {"tau": Constant(0.1)},
    "lam": lambda lab: {"lam": Exponential(1.0, 0.003)},
    "random start": lambda lab: {"init_std": 0.02},
    "prior": lambda lab: {"prior": "magnitude"},
    "draws": lambda lab: {"draw_per": "step"},
    "distillation": lambda lab: {"distillation": 0.5},
    "kept_norm": lambda lab: {"kept_norm": 1e-5},
    "optimizer": lambda lab: {"optimizer": partial(torch.optim.SGD, lr=1e-2)},
    "learning rate": lambda lab: {"optimizer": partial(torch.optim.AdamW, lr=2e-2)},
    "weight decay": lambda lab: {"optimizer": partial(adamw, weight_decay=0.5)},
    "lr_end": lambda lab: {"lr_end": 1e-5},
    "clipping": lambda lab: {"trainer": {"gradient_clip_val": 1.0}},
    "pattern": lambda lab: {"pattern": "1:4"},
    "layers": lambda lab: {"ignore": ["k_proj"]},
    "seed": lambda lab: {"seed": 1, "data": {"seed": 1}},
    "model": lambda lab: {"lm": str(shutil.copytree(lab.model, lab.folder / "elsewhere"))},
    "dtype": lambda lab: {"dtype": "bfloat16"},
    "text": other_text,
    "streaming": lambda lab: {"data": {"corpora": [Corpus(str(lab.corpus), streaming=True)]}},
    "window length": lambda lab: {"data": {"seq_len": 16}},
    "held-out share": lambda lab: {"data": {"held_out_fraction": 0.3}},
    "toggle": lambda lab: {"trainer": {"callbacks": [StraightThroughToggle(3)]}},
}
HARMLESS = {
    "the same": {},
    "steps": {"trainer": {"max_steps": 9}},
    "micro-batches": {"trainer": {"accumulate_grad_batches": 4}, "data": {"batch_size": 1}},
    "workers": {"data": {"num_workers": 2}},
    "validation": {"data": {"val_windows": 2}},
    "logging": {"trainer": {"log_every_n_steps": 7, "callbacks": [HardenMasks(2)]}},
    "recomputation": {"activation_checkpointing": True},
    "the optimizer's implementation": {"optimizer": partial(adamw, fused=True)},
    "the sampler's implementation": {"sampler": GumbelTopK(compiled=False)},
    "a prior's text, without one": {"prior_windows": 3, "prior_strength": 0.5},
}


def test_what_a_mask_is_learned_with_tells_runs_apart(lab):
    own = recipe_of(lab)
    assert json.loads(json.dumps(own)) == own, "plain values, as a checkpoint may hold"
    for name, change in CHANGES.items():
        other = recipe_of(lab, **change(lab))
        assert other != own, name
        with pytest.raises(UserError, match="another run"):
            check_same_run(own, other, "x.ckpt")


@pytest.mark.parametrize("options", HARMLESS.values(), ids=HARMLESS)
def test_what_computes_or_reports_it_does_not(lab, options):
    check_same_run(recipe_of(lab, **options), recipe_of(lab), "x.ckpt")


def test_an_error_names_what_differs():
    with pytest.raises(
        UserError, match=r"x\.ckpt.*: a is 2 there and 1 here; resume .*--allow_changed_settings"
    ):
        check_same_run({"a": 1, "b": 2}, {"a": 2, "b": 2}, "x.ckpt")
    with pytest.raises(UserError, match=r"a is 0 there.*c is 2 there and None here, d is 3 .* and 1 more;"):
        check_same_run(dict.fromkeys("abde", 1), dict(zip("abcde", range(5), strict=True)), "x.ckpt")
