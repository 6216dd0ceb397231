"""The page of a run: what is on it, and that it can be opened and mailed without harm."""

import base64
import json
import math
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger

from helpers.lab import GOING_ON, new_lab, run
from roi_lightning.errors import UserError
from roi_lightning.learning.callbacks import BaselineSummary, HardenMasks, MaskMonitor
from roi_lightning.masks.mask_set import MaskSet
from roi_lightning.masks.overlap import Overlap
from roi_lightning.reports.callback import Report
from roi_lightning.reports.curves import changed_figure, changed_shares
from roi_lightning.reports.page import read_run, write_report

pytestmark = [*GOING_ON, pytest.mark.filterwarnings("ignore:the first draws keep")]
TITLES = ["Loss", "How settled the mask is", "What learning changed", "Where the mask changed most"]
HARM = "<script>alert('&')</script>"


class Page(HTMLParser):
    """The elements of a page, and its text without tags and blanks."""

    def __init__(self, path):
        super().__init__()
        self.elements, self.words, self.source = [], [], path.read_text(encoding="utf-8")
        self.feed(self.source)
        self.text = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))

    def handle_data(self, data):
        self.words.append(data)

    def all(self, tag):
        return [attributes for name, attributes in self.elements if name == tag]


class Losses(Callback):
    """The loss of every step, by the step's number from 0."""

    def __init__(self):
        self.values = {}

    def on_train_batch_end(self, trainer, *args):
        self.values[trainer.global_step - 1] = float(trainer.callback_metrics["train/loss"])


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """A run in two legs, with everything that the page shows, and its losses."""
    lab, losses = new_lab(tmp_path_factory), Losses()
    for steps, resume in ((2, None), (5, "auto")):
        saved = ModelCheckpoint(lab.folder / "checkpoints", "{step}", every_n_train_steps=2)
        callbacks = [losses, HardenMasks(), MaskMonitor(2), BaselineSummary(), Report(), saved]
        trainer = {
            "logger": TensorBoardLogger(lab.folder, name="", version="", default_hp_metric=False),
            "enable_checkpointing": True,
            "limit_val_batches": 1.0,
            "log_every_n_steps": 1,
        }
        options = {"prior": "magnitude", "lr": 0.05, "resume": resume, "overwrite": resume is None}
        lab.learn(steps, callbacks=callbacks, trainer=trainer, **options)
    return lab.folder, losses.values


def test_the_page_says_what_the_run_s_files_say(ran):
    folder, _ = ran
    page = Page(folder / "report.html")
    summary, facts = (json.loads((folder / name).read_text()) for name in ("summary.json", "report.json"))
    for name, value in summary["perplexity"].items():
        assert f"{name} {value:,.2f} {value / summary['perplexity']['dense']:.2f}" in page.text
    assert f"the perplexity of roi is {summary['perplexity']['roi']:,.2f}" in page.text
    assert "5 optimizer steps on 320 tokens" in page.text
    assert "h since it resumed, on" in page.text
    for texts in facts["continuations"]:
        assert all(text.strip() in page.text for text in texts.values())
    for name, value in facts["settings"].items():
        assert f"{name} {value}" in page.text
    assert "Not on this page" not in page.text


def test_figures_are_whole_pictures_with_words_beside(ran):
    pictures = Page(ran[0] / "report.html").all("img")
    assert [picture["alt"].split(". ")[0] for picture in pictures] == TITLES
    masks = [MaskSet.load(ran[0] / name) for name in ("mask.safetensors", "before.safetensors")]
    assert f", {1 - masks[0].overlap(masks[1]).all:.2%};" in pictures[2]["alt"]
    for picture in pictures:
        svg = base64.b64decode(picture["src"].removeprefix("data:image/svg+xml;base64,"))
        assert ElementTree.fromstring(svg).tag.endswith("svg")


def test_the_curve_goes_on_where_a_run_resumed(ran):
    folder, losses = ran
    curves = read_run(folder).curves
    assert dict(curves["train/loss"]) == pytest.approx(losses, abs=1e-6)
    assert sorted({step for step, _ in curves["mask/entropy"]}) == [0, 2, 4, 5]
    prior = json.loads((folder / "summary.json").read_text())["perplexity"]["magnitude"]
    assert curves["val/nll"][0] == pytest.approx((0, math.log(prior)))


def test_where_two_legs_have_a_step_the_later_counts(tmp_path):
    """As where a run was killed between two checkpoints."""
    for leg, steps in enumerate((range(4), range(2, 5))):
        logger = TensorBoardLogger(tmp_path, name="", version="")
        for step in steps:
            logger.log_metrics({"train/loss": leg}, step)
        logger.finalize("failed")
    assert read_run(tmp_path).curves["train/loss"] == [(0, 0), (1, 0), (2, 1), (3, 1), (4, 1)]


def test_a_mask_that_stayed_has_no_figures_of_change(ran, tmp_path):
    copy_of(ran[0], tmp_path)
    (tmp_path / "before.safetensors").write_bytes((tmp_path / "mask.safetensors").read_bytes())
    write_report(tmp_path, tmp_path / "report.html")
    page = Page(tmp_path / "report.html")
    assert not page.all("img")
    assert page.text.count("No weight changed places") == 1


def test_the_page_loads_nothing(ran):
    page = Page(ran[0] / "report.html")
    assert not {"script", "link", "iframe", "object"} & {tag for tag, _ in page.elements}
    assert "url(" not in page.source
    assert "@import" not in page.source
    assert all(element["src"].startswith("data:") for element in page.all("img"))
    assert "default-src 'none'" in page.source
    assert "prefers-color-scheme: dark" in page.source
    assert any(meta.get("name") == "viewport" for meta in page.all("meta"))


def test_texts_are_escaped(ran, tmp_path):
    copy_of(ran[0], tmp_path)
    facts = json.loads((tmp_path / "report.json").read_text())
    facts |= {"model": HARM, "text": HARM, "continuations": [{"prompt": HARM, HARM: HARM}]}
    (tmp_path / "report.json").write_text(json.dumps(facts | {"settings": {HARM: HARM}}))
    write_report(tmp_path, tmp_path / "report.html")
    page = Page(tmp_path / "report.html")
    assert not page.all("script")
    assert page.text.count(HARM) == 9, "title twice, two sentences, setting and value, prompt, name, text"


def copy_of(folder, to, names=("summary.json", "report.json", "mask.safetensors", "before.safetensors")):
    for name in names:
        (to / name).write_bytes((folder / name).read_bytes())


def test_a_run_that_was_killed_has_a_page_of_its_curves(ran, tmp_path):
    copy_of(ran[0], tmp_path, [path.name for path in ran[0].glob("events.*")])
    assert run("report", tmp_path, "--out", tmp_path / "page.html") == 0
    page = Page(tmp_path / "page.html")
    assert "has not finished" in page.text
    assert [picture["alt"].split(". ")[0] for picture in page.all("img")] == TITLES[:2]
    assert all(name in page.text for name in ("BaselineSummary", "HardenMasks", "Report"))


def test_the_same_run_makes_the_same_page(ran, tmp_path):
    """It may be written over the first, too."""
    pages = []
    for _ in range(2):
        write_report(ran[0], tmp_path / "a.html")
        pages.append((tmp_path / "a.html").read_bytes())
    assert pages[0] == pages[1]


def test_what_can_t_be_reported_or_written_is_refused(ran, tmp_path):
    with pytest.raises(UserError, match="nothing to report"):
        write_report(tmp_path, tmp_path / "page.html")
    with pytest.raises(UserError, match=f"did you mean {ran[0]}"):
        write_report(ran[0].with_name(f"{ran[0].name}s"), tmp_path / "page.html")
    thesis = tmp_path / "thesis.html"
    thesis.write_text("<p>years of work")
    with pytest.raises(UserError, match="is no report"):
        write_report(ran[0], thesis)
    assert thesis.read_text() == "<p>years of work"
    for content in (
        '{"perplexity"',
        '{"perplexity": {}}',
        '{"perplexity": {"dense": "1"}, "zeros": 1}',
        "[3]",
    ):
        (tmp_path / "summary.json").write_text(content)
        with pytest.raises(UserError, match=r"summary\.json .* is damaged"):
            write_report(tmp_path, tmp_path / "page.html")


def test_the_heat_map_shows_the_share_of_every_kind_and_block():
    kept = {"h.0.a.up.weight": 8, "h.0.b.up.weight": 8, "h.1.a.up.weight": 8, "h.1.down.weight": 4}
    both = {"h.0.a.up.weight": 8, "h.0.b.up.weight": 4, "h.1.a.up.weight": 8, "h.1.down.weight": 1}
    shares = changed_shares(Overlap(both, kept))
    assert shares == {"up": {0: 0.25, 1: 0.0}, "down": {1: 0.75}}
    axes, _ = changed_figure(shares).axes
    (mesh,) = axes.collections
    assert mesh.get_array().tolist() == [[0.25, 0.0], [None, 0.75]]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["up", "down"]
