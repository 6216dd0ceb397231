"""What a run's report says, counted again from the files and the models that the run left."""

import html
import json
from functools import partial

import pytest
import torch
from lightning.pytorch import LightningDataModule
from transformers import AutoModelForCausalLM

from cli_helpers import QUICK_TRAINER, brute_top, fit, new_lab
from roi_lightning.contrib.proxsparse import ProxSparseModule
from roi_lightning.errors import UserError
from roi_lightning.learning.callbacks import BaselineSummary, HardenMasks, Report, SparseExport
from roi_lightning.learning.trainer import RoITrainer
from roi_lightning.masks.mask_set import MaskSet
from roi_lightning.models.layers import prunable_layers
from roi_lightning.models.loading import load_language_model
from roi_lightning.models.source import resolve_model
from roi_lightning.oneshot import Calibration, Wanda, prune_layers
from tiny_models import tiny_llama, tiny_tokenizer

pytestmark = pytest.mark.filterwarnings("ignore:the first draws keep")
GIVEN = "the cat saw"


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """A run from a prior that is neither magnitude's nor sequential, and what it said."""
    lab = new_lab(tmp_path_factory)
    model = tiny_llama(lab.folder / "llama")
    report = Report([GIVEN], held_out_prompts=2, max_new_tokens=6)
    callbacks = [HardenMasks(), SparseExport(), BaselineSummary(windows=1), report]
    options = {"prior": "activation", "prior_windows": 2, "lr": 0.05, "callbacks": callbacks}
    learner, _ = lab.learn(3, model=model, **options)
    return lab, learner, json.loads((lab.folder / "report.json").read_text())


def kept(path):
    """Boolean [out, in] by tensor, of a file."""
    return {name: mask.to_bool() for name, mask in MaskSet.load(path).layers.items()}


def shares(after, other):
    """By all and by kind: kept by both over kept, by hand."""
    kinds = {}
    for name, mask in after.items():
        counts = kinds.setdefault(name.split(".")[-2], [0, 0])
        counts[0] += int((mask & other[name]).sum())
        counts[1] += int(mask.sum())
    both, every = (sum(counts[i] for counts in kinds.values()) for i in (0, 1))
    return {"all": both / every, "kinds": {kind: a / b for kind, (a, b) in kinds.items()}}


def test_changed_cells_and_corners_are_those_of_the_files(ran):
    lab, learner, found = ran
    before, after = kept(lab.folder / "prior.safetensors"), kept(lab.folder / "mask.safetensors")
    for name, mask in learner.prior_masks.items():
        assert torch.equal(before[f"{name}.weight"], mask.to_bool())
    assert found["mask"]["pattern"] == "2:4"
    assert found["mask"]["reference"] == "activation"
    assert found["mask"]["skipped"] == {}
    assert list(found["mask"]["changed"]) == list(after)
    for name, counts in found["mask"]["changed"].items():
        assert counts == {"kept": int(after[name].sum()), "both": int((after[name] & before[name]).sum())}
        assert counts["both"] < counts["kept"]
    layers = [corner["layer"] for corner in found["mask"]["corners"]]
    kinds = ("self_attn.q_proj", "self_attn.k_proj", "mlp.up_proj")
    assert sorted(layers) == sorted(f"model.layers.{i}.{kind}.weight" for i in (0, 1) for kind in kinds)
    for corner in found["mask"]["corners"]:
        for rows, masks in ((corner["before"], before), (corner["after"], after)):
            cells = torch.tensor([[cell == "1" for cell in row] for row in rows])
            assert torch.equal(cells, masks[corner["layer"]][:8, :8])


def test_overlaps_with_masks_made_by_other_means(ran):
    lab, learner, found = ran
    lm = load_language_model(resolve_model(str(lab.folder / "llama")))
    layers = prunable_layers(lm, ["*"], [])
    windows = lab.data().windows("train", 4)
    wanda = prune_layers(lm, layers, Wanda(), learner.pattern, Calibration(windows))
    others = {
        "magnitude": {f"{name}.weight": brute_top(x.weight.abs(), 2, 4) for name, x in layers.items()},
        "wanda": {f"{name}.weight": result.mask for name, result in wanda},
        "activation": kept(lab.folder / "prior.safetensors"),
    }
    after = kept(lab.folder / "mask.safetensors")
    assert found["mask"]["overlap"] == {name: shares(after, masks) for name, masks in others.items()}
    assert len({x["all"] for x in found["mask"]["overlap"].values()}) == 3


def test_continuations_are_those_of_the_models_that_the_run_left(ran):
    lab, learner, found = ran
    assert found["generation"] == {"max_new_tokens": 6, "method": "greedy"}
    tokenizer, windows = tiny_tokenizer(), lab.data().windows("val", 2 * (lab.data().val_tokens // 64))
    first, second, given = found["continuations"]
    assert (first["source"], second["source"], given["source"]) == (*2 * ["held-out text"], "given")
    assert (given["prompt"], given["expected"]) == (GIVEN, None)
    for item, window in ((first, windows[0]), (second, windows[len(windows) // 2])):
        parts = [tokenizer.decode(part, skip_special_tokens=True) for part in window[:22].tensor_split([16])]
        assert [item["prompt"], item["expected"]] == parts
    models = {"dense": lab.folder / "llama", "roi": lab.folder / "export"}
    prior = AutoModelForCausalLM.from_pretrained(lab.folder / "llama")
    with torch.no_grad():
        for name, mask in kept(lab.folder / "prior.safetensors").items():
            prior.get_parameter(name).mul_(mask)
    lms = {name: AutoModelForCausalLM.from_pretrained(path) for name, path in models.items()}
    prompts = [windows[0][:16], windows[len(windows) // 2][:16], torch.tensor(tokenizer(GIVEN)["input_ids"])]
    for name, lm in (lms | {"activation": prior}).items():
        for item, ids in zip(found["continuations"], prompts, strict=True):
            out = lm.generate(ids[None], attention_mask=torch.ones(1, len(ids)), max_new_tokens=6)
            assert item["answers"][name] == tokenizer.decode(out[0, len(ids) :], skip_special_tokens=True)
    assert list(given["answers"]) == ["dense", "activation", "roi"]
    assert len({tuple(x["answers"][name] for x in found["continuations"]) for name in given["answers"]}) == 3
    assert learner.state.mode != "fixed"


def test_the_page_shows_what_was_said(ran):
    lab, _, found = ran
    page = html.unescape((lab.folder / "report.html").read_text())
    assert "activation" in page
    for item in found["continuations"]:
        assert item["prompt"] in page


def test_a_page_that_can_t_be_written_costs_a_warning(tmp_path_factory, monkeypatch):
    def fail(sources, out):
        raise ZeroDivisionError("no page")

    monkeypatch.setattr("roi_lightning.learning.callbacks.report.write_report", fail)
    lab = new_lab(tmp_path_factory)
    said = (
        r"report.html' could not be written \(ZeroDivisionError: no page\); all other results are; roi-light"
    )
    with pytest.warns(UserWarning, match=said):
        lab.learn(1, callbacks=[Report(held_out_prompts=0)])
    assert (lab.folder / "report.json").exists()


class Rows(LightningDataModule):
    """Somebody's own windows, of which none is held out."""

    def train_dataloader(self):
        rows = [{"input_ids": torch.arange(i, i + 32)} for i in range(8)]
        return torch.utils.data.DataLoader(rows, batch_size=2)

    val_dataloader = train_dataloader


@pytest.mark.parametrize("prompts", [[GIVEN], None])
def test_a_learner_without_prior_on_somebody_s_own_windows(tmp_path_factory, prompts):
    lab = new_lab(tmp_path_factory)
    optimizer = partial(torch.optim.AdamW, lr=1e-2)
    learner = ProxSparseModule(str(lab.model), strength=1.0, optimizer=optimizer)
    options = {
        "max_steps": 2,
        "callbacks": [Report(prompts, max_new_tokens=2)],
        "log_every_n_steps": 1,
    }
    fit(RoITrainer(**QUICK_TRAINER | options, default_root_dir=str(lab.folder)), learner, Rows())
    found = json.loads((lab.folder / "report.json").read_text())
    assert found["mask"]["reference"] == "magnitude"
    assert list(found["mask"]["overlap"]) == ["magnitude"]
    assert "CalibrationDataModule" in found["mask"]["skipped"].pop("wanda")
    assert not (lab.folder / "prior.safetensors").exists()
    assert "magnitude" in (lab.folder / "report.html").read_text()
    if prompts:
        (item,) = found["continuations"]
        assert list(item["answers"]) == ["dense", "magnitude", "proxsparse"]
        assert not found["mask"]["skipped"]
    else:
        assert found["continuations"] == []
        assert "no prompt" in found["mask"]["skipped"]["continuations"]


def test_what_can_t_be_continued_is_refused_before_the_first_step(tmp_path_factory, tmp_path):
    lab = new_lab(tmp_path_factory)
    with pytest.raises(
        UserError, match=r"a prompt of 16 tokens and 120 new ones are more than the model's 128"
    ):
        lab.learn(1, callbacks=[Report(max_new_tokens=120)])
    assert not (lab.folder / "report.json").exists()
    file = tmp_path / "prompts.txt"
    file.write_text("one\ntwo\n")
    assert Report(str(file)).prompts == ["one", "two"]
    with pytest.raises(UserError, match="a prompt per line"):
        Report(str(tmp_path / "none.txt"))
    for options in ({"held_out_prompts": -1}, {"max_new_tokens": 0}, {"wanda_windows": 0}):
        with pytest.raises(UserError, match="give at least 0, 1 and 1"):
            Report(**options)
