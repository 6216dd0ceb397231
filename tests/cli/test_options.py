"""Options of `fit` that docs/ names, as they are typed."""

import re
from pathlib import Path

import pytest
import yaml

from helpers.lab import make_lab, run
from helpers.tiny_models import tiny_llama
from roi_lightning.cli.lightning import build
from roi_lightning.learning.roi import RoILightningModule
from roi_lightning.masks.mask_set import MaskSet
from roi_lightning.samplers import Categorical
from roi_lightning.samplers.schedules import Linear

lab = pytest.fixture(make_lab)
PAGE = (Path(__file__).parents[2] / "docs/monitoring.md").read_text()


def test_the_printed_configuration_is_the_one_that_runs(lab, capsys):
    asked = lab.quick("--model.sampler", "StraightThrough", max_steps=1)
    assert run("fit", *asked, "--print_config") == 0
    printed = capsys.readouterr().out
    assert list(lab.folder.iterdir()) == []
    (lab.folder / "printed.yaml").write_text(printed)
    assert run("fit", "--config", "printed.yaml", "--print_config") == 0
    assert capsys.readouterr().out == printed
    assert run("fit", *asked) == 0
    (kept,) = lab.folder.rglob("config.yaml")
    printed, ran = yaml.safe_load(printed), yaml.safe_load(kept.read_text())
    assert all(printed[part] == ran[part] for part in ("seed_everything", "model", "data", "trainer"))
    assert printed["model"]["init_args"]["sampler"]["class_path"].endswith(".StraightThrough")


def test_callbacks_are_added_to_those_that_are_there(lab):
    (snippet,) = re.findall(r"```yaml\n(trainer:\n  callbacks\+:\n.*?)```", PAGE, re.DOTALL)
    (lab.folder / "more.yaml").write_text(snippet)
    before = build(lab.quick()).trainer.callbacks
    after = build(lab.quick("--config", "more.yaml")).trainer.callbacks
    (toggle,) = {type(callback).__name__ for callback in after} - {
        type(callback).__name__ for callback in before
    }
    assert toggle == "StraightThroughToggle"
    assert len(after) == len(before) + 1


def test_a_sampler_alone_leaves_the_schedules_as_they_are(lab):
    assert run("fit", *lab.quick("--model.sampler", "Categorical", max_steps=2)) == 0
    (file,) = lab.folder.rglob("mask.safetensors")
    assert MaskSet.load(file).layers
    module = build(lab.quick("--model.sampler", "Categorical")).model
    assert module.sampler == Categorical()
    assert (module.lam, module.tau) == (Linear(0.005, 0.002, 0.75), Linear(0.2, 0.05, 0.75))


@pytest.mark.parametrize(("init_std", "flipped"), [(0.01, 0.03), (0.003, 0.0)])
def test_randomness_at_the_start_flips_what_readme_says(init_std, flipped, tmp_path):
    module = RoILightningModule(str(tiny_llama(tmp_path)), prior="magnitude", init_std=init_std)
    module.configure_model()
    module.start.initialise(module, module.sampler)
    masks = {name: (x.to_rows(), module.prior_masks[name].to_rows()) for name, x in module.hard_masks()}
    kept = sum(int(prior.sum()) for _, prior in masks.values())
    lost = sum(int((prior & ~mask).sum()) for mask, prior in masks.values())
    assert lost / kept == pytest.approx(flipped, abs=0.003)
