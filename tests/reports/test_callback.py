"""What a run leaves for its report, made again from the files and the models that the run left."""

import json

import pytest
import torch
from lightning.pytorch import LightningDataModule
from transformers import AutoModelForCausalLM

from helpers.lab import brute_top, new_lab
from helpers.tiny_models import tiny_llama, tiny_tokenizer
from roi_lightning.contrib.proxsparse import ProxSparseModule
from roi_lightning.learning.callbacks import HardenMasks, SparseExport
from roi_lightning.masks.mask_set import MaskSet
from roi_lightning.reports.callback import Report

pytestmark = pytest.mark.filterwarnings("ignore:the first draws keep")


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """A run from a prior, its learner, and what it said."""
    lab = new_lab(tmp_path_factory)
    model = tiny_llama(lab.folder / "llama")
    options = {"prior": "activation", "prior_windows": 2, "lr": 0.05, "activation_checkpointing": True}
    learner, _ = lab.learn(3, model=model, callbacks=[HardenMasks(), SparseExport(), Report()], **options)
    return lab, learner, json.loads((lab.folder / "report.json").read_text())


def kept(path):
    """Boolean [out, in] by tensor, of a file."""
    return {name: mask.to_bool() for name, mask in MaskSet.load(path).layers.items()}


def test_the_mask_before_learning_is_the_prior(ran):
    lab, learner, facts = ran
    before = kept(lab.folder / "before.safetensors")
    assert (facts["before"], facts["prior"]) == ("activation", "activation")
    assert before.keys() == {f"{name}.weight" for name in learner.prior_masks}
    for name, mask in learner.prior_masks.items():
        assert torch.equal(before[f"{name}.weight"], mask.to_bool())


def test_the_facts_are_those_of_the_run(ran):
    lab, learner, facts = ran
    assert facts["settings"] == learner.run_recipe
    assert (facts["method"], facts["pattern"], facts["layers"]) == ("roi", "2:4", len(learner.tensors))
    assert (facts["steps"], facts["tokens"], facts["text"]) == (3, 3 * 2 * 32, str(lab.corpus))


def test_continuations_are_those_of_the_models_that_the_run_left(ran):
    lab, learner, facts = ran
    tokenizer, count = tiny_tokenizer(), lab.data().val_tokens // 32
    windows = lab.data().windows("val", count)[[0, count // 2]]
    models = {"dense": lab.folder / "llama", "activation": lab.folder / "llama", "roi": lab.folder / "export"}
    lms = {name: AutoModelForCausalLM.from_pretrained(path) for name, path in models.items()}
    with torch.no_grad():
        for name, mask in kept(lab.folder / "before.safetensors").items():
            lms["activation"].get_parameter(name).mul_(mask)
    for found, window in zip(facts["continuations"], windows, strict=True):
        assert list(found) == ["prompt", "the text itself", *models]
        parts = window.tensor_split([16])
        assert [found["prompt"], found["the text itself"]] == tokenizer.batch_decode(
            parts, skip_special_tokens=True
        )
        for name, lm in lms.items():
            out = lm.generate(parts[0][None], attention_mask=torch.ones(1, 16), max_new_tokens=48)
            assert found[name] == tokenizer.decode(out[0, 16:], skip_special_tokens=True)
    assert len({tuple(x[name] for x in facts["continuations"]) for name in models}) == 3
    assert learner.student.training


def test_a_page_that_can_t_be_written_costs_a_warning(tmp_path_factory, monkeypatch):
    def fail(folder, out):
        raise ZeroDivisionError("no page")

    monkeypatch.setattr("roi_lightning.reports.page.write_report", fail)
    lab = new_lab(tmp_path_factory)
    with pytest.warns(UserWarning, match=r"ZeroDivisionError: no page.*all other results are; roi-light"):
        lab.learn(1, callbacks=[Report()])
    assert (lab.folder / "report.json").exists()


class Rows(LightningDataModule):
    """Somebody's own windows, of which none is held out."""

    def train_dataloader(self):
        rows = [{"input_ids": torch.arange(i, i + 32)} for i in range(8)]
        return torch.utils.data.DataLoader(rows, batch_size=2)

    val_dataloader = train_dataloader


def test_a_learner_without_prior_on_somebody_s_own_windows(tmp_path_factory):
    lab = new_lab(tmp_path_factory)
    options = {"callbacks": [HardenMasks(), Report()], "trainer": {"log_every_n_steps": 1}, "strength": 1.0}
    lab.learn(2, kind=ProxSparseModule, data=Rows(), **options)
    facts = json.loads((lab.folder / "report.json").read_text())
    assert (facts["before"], facts["prior"], facts["continuations"]) == ("magnitude", None, [])
    weights = AutoModelForCausalLM.from_pretrained(lab.model).state_dict()
    for name, mask in kept(lab.folder / "before.safetensors").items():
        assert torch.equal(mask, brute_top(weights[name].float().abs(), 2, 4))
    assert "magnitude" in (lab.folder / "report.html").read_text()
