"""A run that can't fit says so before text or weights are read."""

import json
from pathlib import Path

import pytest
import torch

from helpers.lab import make_lab, run
from helpers.tiny_models import tiny_qwen2
from roi_lightning.utils import devices

lab = pytest.fixture(make_lab)


@pytest.fixture
def enormous(tmp_path):
    """A model's configuration, as large as no machine's memory, and no weights."""
    folder = tiny_qwen2(tmp_path / "enormous")
    (folder / "model.safetensors").unlink()
    config = json.loads((folder / "config.json").read_text())
    wide = {"hidden_size": 65536, "intermediate_size": 1 << 20}
    (folder / "config.json").write_text(json.dumps(config | wide))
    return folder


def test_a_run_that_cannot_fit_is_refused_at_the_start(lab, enormous, capsys):
    before = sorted(path for path in lab.folder.rglob("*"))
    assert run("fit", *lab.quick(model=enormous)) == 1
    said = capsys.readouterr().err
    assert said.startswith("error: weights, logits, gradients and optimizer states take ")
    assert "plan --fit_in" in said
    assert sorted(path for path in lab.folder.rglob("*")) == before


@pytest.mark.parametrize("limit", ["max", "1000", "9" * 30, None])
def test_a_cpu_has_what_is_installed_or_allowed(limit, tmp_path, monkeypatch):
    monkeypatch.setattr(devices, "_CONTAINER_LIMIT", tmp_path / "memory.max")
    if limit is not None:
        (tmp_path / "memory.max").write_text(f"{limit}\n")
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    installed = 1024 * int(lines["MemTotal"].split()[0])
    assert devices.memory_of(torch.device("cpu")) == (1000 if limit == "1000" else installed)
