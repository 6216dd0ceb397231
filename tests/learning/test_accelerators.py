"""Where a mask is learned, on a machine that says it has a Mac's GPU."""

import pytest
import torch
from lightning.fabric.accelerators.mps import MPSAccelerator as FabricsMPS
from lightning.pytorch.accelerators import MPSAccelerator

from helpers.lab import QUICK_TRAINER, make_lab
from roi_lightning.errors import UserError
from roi_lightning.learning.trainer import RoITrainer

lab = pytest.fixture(make_lab)


@pytest.fixture(autouse=True)
def _mac(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for kind in (FabricsMPS, MPSAccelerator):
        monkeypatch.setattr(kind, "is_available", staticmethod(lambda: True))


@pytest.mark.filterwarnings("ignore:GPU available but not used")
def test_auto_is_the_cpu(lab):
    options = {name: value for name, value in QUICK_TRAINER.items() if name != "accelerator"}
    for chosen in ({}, {"accelerator": "auto"}):
        trainer = RoITrainer(**options, **chosen, max_steps=1, default_root_dir=str(lab.folder))
        assert trainer.strategy.root_device == torch.device("cpu")


@pytest.mark.parametrize("name", ["mps", "gpu", MPSAccelerator])
def test_mps_is_refused(lab, name):
    name = name if isinstance(name, str) else name()
    options = QUICK_TRAINER | {"accelerator": name, "max_steps": 1, "default_root_dir": str(lab.folder)}
    with pytest.raises(UserError, match=f"accelerator {name!r}; set it to auto or cpu"):
        RoITrainer(**options)
