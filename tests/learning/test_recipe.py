"""A run resumes only itself: what counts as the same run, and what `fit`, `export` do with another's checkpoint."""

import json
import shutil
from functools import partial

import pytest
import torch
from lightning.pytorch import Callback

from helpers.lab import GOING_ON, QUICK_TRAINER, make_lab, run
from helpers.text_files import write_jsonl
from roi_lightning.contrib.proxsparse import ProxSparseModule
from roi_lightning.data import Corpus
from roi_lightning.errors import UserError
from roi_lightning.export.sidecar import read_sidecar
from roi_lightning.learning.callbacks import HardenMasks, StraightThroughToggle
from roi_lightning.learning.recipe import check_same_run, run_recipe
from roi_lightning.learning.roi import RoILightningModule
from roi_lightning.learning.trainer import RoITrainer
from roi_lightning.samplers import Categorical, GumbelTopK, StraightThrough
from roi_lightning.samplers.schedules import Constant, Exponential

lab = pytest.fixture(make_lab)
pytestmark = GOING_ON
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


class StepsMade(Callback):
    """Counts the steps of all fits."""

    def __init__(self):
        self.steps = []

    def on_train_batch_end(self, trainer, *args):
        self.steps.append(trainer.global_step)


def fast(lab, *more, **options):
    """The quickstart at a learning rate that settles other masks within four steps."""
    return lab.quick("--model.optimizer.lr", "0.05", *more, **options)


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory):
    """A finished quickstart on the tiny model, in a folder of runs."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("quickstart")
        lab = make_lab(folder, tmp_path_factory, patch)
        assert run("fit", *fast(lab)) == 0
    return folder / "runs"


@pytest.fixture
def finished(lab, quickstart):
    return shutil.copytree(quickstart, lab.folder / "runs", symlinks=True) / "quickstart"


def sampler_of(folder):
    return read_sidecar(folder / "export")["training"]["sampler"].split("(")[0]


def test_resume_auto_passes_over_another_runs_checkpoints(lab, finished, capsys, caplog):
    before = {path: path.read_bytes() for path in finished.rglob("*") if path.is_file()}
    straight = [*fast(lab), "--model.sampler", "StraightThrough", "--resume", "auto"]
    assert run("fit", *straight) == 1
    assert "model.sampler is GumbelTopK there and StraightThrough here" in caplog.text
    assert "is of an earlier run" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in finished.rglob("*") if path.is_file()} == before
    assert run("fit", *straight, "--overwrite") == 0
    assert sampler_of(finished) == "StraightThrough"
    assert (finished / "mask.safetensors").read_bytes() != before[finished / "mask.safetensors"]


def test_a_finished_run_resumes_to_the_same_mask(lab, finished):
    mask, made = (finished / "mask.safetensors").read_bytes(), (finished / "checkpoints/last.ckpt").resolve()
    shutil.rmtree(finished / "export")
    assert run("fit", *fast(lab), "--resume", "auto") == 0
    assert (finished / "mask.safetensors").read_bytes() == mask
    assert (finished / "checkpoints/last.ckpt").resolve() == made, "no step was left to make"
    assert sampler_of(finished) == "GumbelTopK"


def test_a_named_checkpoint_of_another_run_has_to_be_meant(lab, finished, capsys):
    last = finished / "checkpoints/last.ckpt"
    other = [*fast(lab), "--run", "other", "--model.optimizer.lr", "0.01", "--ckpt_path", last]
    assert run("fit", *other) == 1
    assert "model.optimizer.lr is 0.05 there and 0.01 here" in capsys.readouterr().err
    assert not (lab.folder / "runs/other").exists()
    assert run("fit", *other, "--allow_changed_settings", "--trainer.max_steps", "6") == 0
    assert read_sidecar(lab.folder / "runs/other/export")["training"]["steps"] == 6
    assert run("fit", *fast(lab), "--allow_changed_settings", "--run", "third") == 1
    assert "--ckpt_path" in capsys.readouterr().err


def test_steps_may_grow_and_not_shrink(lab, finished, capsys):
    last = finished / "checkpoints/last.ckpt"
    assert run("fit", *fast(lab, max_steps=3), "--ckpt_path", last) == 1
    assert "run of 4 optimizer steps, and trainer.max_steps is 3" in capsys.readouterr().err
    assert run("fit", *fast(lab, max_steps=6), "--resume", "auto") == 0
    assert read_sidecar(finished / "export")["training"]["steps"] == 6


def test_export_takes_the_name_of_the_run_that_learned(lab, finished, capsys):
    last = finished / "checkpoints/last.ckpt"
    straight = [*fast(lab), "--model.sampler", "StraightThrough", "--ckpt_path", last, "--out", "out"]
    assert run("export", *straight) == 1
    assert "model.sampler is GumbelTopK there" in capsys.readouterr().err
    assert not (lab.folder / "out").exists()
    lab.corpus.rename(lab.corpus.with_suffix(".gone"))  # the text is not needed
    try:
        assert run("export", *fast(lab), "--ckpt_path", last, "--out", "out") == 0
    finally:
        lab.corpus.with_suffix(".gone").rename(lab.corpus)
    own, exported = (read_sidecar(path)["training"] for path in (finished / "export", lab.folder / "out"))
    assert own == exported


def test_a_switch_of_estimator_is_in_the_export(lab):
    toggle = "{class_path: StraightThroughToggle, init_args: {at_step: 2}}"
    assert run("fit", *fast(lab), f"--trainer.callbacks+={toggle}") == 0
    training = read_sidecar(lab.folder / "runs/quickstart/export")["training"]
    assert training["sampler"].startswith("GumbelTopK(")
    assert training["StraightThroughToggle"] == "straight_through from step 2 on"
    for name in ("optimizer", "lr_end", "init_std", "draw_per", "prior_windows", "fingerprint"):
        assert name in training
    assert "lr=0.05" in training["optimizer"]
    assert "weight_decay=0.0" in training["optimizer"]
