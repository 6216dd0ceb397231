"""Runs as docs/training.md types them, which Lightning's own launcher spreads over processes."""

import os
import subprocess
import sys

import pytest

from helpers.lab import make_lab, run
from roi_lightning.export import verify_export
from roi_lightning.masks.mask_set import MaskSet

lab = pytest.fixture(make_lab)


@pytest.mark.slow
# Ranks that share a model share a draw, too.
@pytest.mark.parametrize(("overlay", "draw_per"), [("ddp", "micro_batch"), ("fsdp2", "step")])
def test_one_command_starts_a_process_for_every_device(lab, overlay, draw_per):
    fast = ["--model.optimizer.init_args.lr", "0.02", "--model.lr_end", "0.02"]
    fast += ["--model.draw_per", draw_per, "--trainer.default_root_dir"]
    spread = ["--config", f"overlays/{overlay}.yaml", "--trainer.devices", "2"]
    command = [sys.executable, "-m", "roi_lightning", "fit", *lab.quick(*spread, *fast, "two")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert run("fit", *lab.quick(*fast, "alone", accumulate=2)) == 0
    one, two = (MaskSet.load(lab.folder / name / "mask.safetensors") for name in ("alone", "two"))
    assert one.overlap(two).all > 0.98
    assert verify_export(lab.folder / "two/export").ok
