"""Denormals are flushed to zero while masks are learned, by command or from Python, and not afterwards."""

from contextlib import suppress

import pytest
import torch
from lightning.pytorch import Callback

from helpers.lab import make_lab
from roi_lightning.utils.devices import denormals_as_zero

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


@pytest.mark.usefixtures("_two_threads")
def test_a_run_flushes_them(lab):
    seen = []

    class Look(Callback):
        def on_train_batch_end(self, *args):
            seen.append(zeros())

    lab.learn(2, callbacks=[Look()])
    assert seen == [1 << 20] * 2
    assert zeros() == 0
