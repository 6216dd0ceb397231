"""AdamW with its states in 8 bits: it learns alike, resumes exactly, and holds what the plan says."""

import sys
import warnings

import pytest
import torch

from helpers.lab import GOING_ON, make_lab, new_lab, run
from helpers.tiny_models import tiny_qwen2
from roi_lightning.cli.plan import make_plan
from roi_lightning.masks.mask_set import MaskSet

lab = pytest.fixture(make_lab)
OVERLAY = "overlays/adamw8bit.yaml"
FAST = "--model.optimizer.init_args.lr", "2e-2", "--model.lr_end", "1e-2"
pytestmark = GOING_ON


@pytest.fixture(scope="module")
def torchao():
    with warnings.catch_warnings():
        # The compiler that torchao's step goes through meets torch's own deprecated parts when it is first imported.
        warnings.simplefilter("ignore")
        import torch._inductor.compile_fx  # noqa: F401

        pytest.importorskip("torchao", reason="torchao is not installed")


@pytest.fixture(scope="module")
def wide_lab(tmp_path_factory):
    """torchao leaves layers of fewer than 4,096 logits alone."""
    lab = new_lab(tmp_path_factory)
    lab.model = tiny_qwen2(lab.folder / "wider", num_key_value_heads=4)
    return lab


@pytest.fixture(scope="module")
def narrow(wide_lab, torchao):
    """The folder of a run in 8 bits, with checkpoints."""
    cut = "--trainer.callbacks.every_n_train_steps", "4", "--trainer.callbacks.save_top_k", "-1"
    return fit(wide_lab, "narrow", "--config", OVERLAY, *FAST, *cut)


def fit(lab, name, *more):
    folder = lab.folder / name
    assert run("fit", *lab.quick("--trainer.default_root_dir", folder, *more, max_steps=8)) == 0
    return folder


def masks(folder):
    return {name: mask.to_bool() for name, mask in MaskSet.load(folder / "mask.safetensors").layers.items()}


@pytest.mark.slow
def test_states_hold_what_was_planned(wide_lab, narrow):
    plan = make_plan([*wide_lab.quick(), "--config", OVERLAY])
    checkpoint = torch.load(next(narrow.rglob("*.ckpt")), weights_only=True)
    held = 0
    for state in checkpoint["optimizer_states"][0]["state"].values():
        for value in state.values():
            if hasattr(value, "codes"):
                held += value.codes.nbytes + value.scale.nbytes
    assert plan["bytes"]["optimizer"] == pytest.approx(held, rel=0.01)
    assert plan["bytes"]["optimizer"] < 0.26 * make_plan(wide_lab.quick())["bytes"]["optimizer"]


@pytest.mark.slow
def test_a_resumed_run_ends_with_the_same_bits(wide_lab, narrow):
    checkpoint = next(narrow.rglob("*step=4*.ckpt"))
    again = "--config", OVERLAY, *FAST, "--ckpt_path", str(checkpoint)
    resumed = masks(fit(wide_lab, "resumed", *again))
    assert all(torch.equal(mask, resumed[name]) for name, mask in masks(narrow).items())


class Missing:
    """Finds that torchao is not there."""

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torchao":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def test_without_torchao_the_error_names_it(lab, capsys, monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchao"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Missing(), *sys.meta_path])
    assert run("fit", *lab.quick("--config", OVERLAY)) == 2
    assert "torchao" in capsys.readouterr().err
