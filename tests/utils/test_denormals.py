"""Denormals are flushed to zero while masks are learned, by command or from Python, and not afterwards."""

from contextlib import suppress

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from cli_helpers import make_lab, run
from roi_lightning.api import learn
from roi_lightning.masks.mask_set import MaskSet
from roi_lightning.utils.devices import denormals_as_zero
from tiny_models import tiny_llama

lab = pytest.fixture(make_lab)


def zeros():
    """How many of a million denormals come out of a product by all threads as zero."""
    return int((torch.full((1 << 20,), 1e-40) * 1.0 == 0).sum())


@pytest.fixture
def _two_threads():
    torch.set_num_threads(2)
    assert zeros() == 0  # and both have worked
    yield
    torch.set_num_threads(1)


@pytest.mark.usefixtures("_two_threads")
def test_they_are_zero_in_every_thread_and_then_no_longer():
    with denormals_as_zero():
        assert zeros() == 1 << 20
        with suppress(KeyError), denormals_as_zero():
            raise KeyError
        assert zeros() == 1 << 20
    assert zeros() == 0


def values_as_denormals(folder):
    """A model whose attention values are denormal until the output projection scales them up."""
    file = tiny_llama(folder) / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in tensors.items():
        tensors[name] = tensor * {"v_proj": 1e-38, "o_proj": 1e38}.get(name.split(".")[-2], 1)
    largest = tensors["model.layers.0.self_attn.v_proj.weight"].abs().max()
    assert 0 < largest < torch.finfo(torch.float32).tiny
    save_file(tensors, file, {"format": "pt"})
    return folder


def test_the_command_and_the_function_learn_the_same_where_it_matters(lab):
    model = values_as_denormals(lab.folder / "model")
    lm, tokenizer = AutoModelForCausalLM.from_pretrained(model), AutoTokenizer.from_pretrained(model)
    quick = {
        "steps": 3,
        "seq_len": 32,
        "batch_size": 2,
        "windows_per_step": 8,
        "accelerator": "cpu",
        "enable_progress_bar": False,
    }
    learned = learn(lm, tokenizer, str(lab.corpus), **quick, learning_rate=0.02)
    assert zeros() == 0
    options = ["--config", "overlays/small_budget.yaml", *lab.options(3, accumulate=4, model=model)]
    options += ["--data.val_corpora", str(lab.corpus), "--trainer.limit_val_batches", "0"]
    options += [
        "--model.prior_windows",
        "24",
        "--model.optimizer.init_args.lr",
        "0.02",
        "--model.lr_end",
        "0.002",
    ]
    assert run("fit", "--config", "quickstart.yaml", *options) == 0
    assert zeros() == 0
    (file,) = lab.folder.rglob("mask.safetensors")
    typed = MaskSet.load(file)
    assert all(torch.equal(mask.packed, typed.layers[name].packed) for name, mask in learned.layers.items())
