"""What README.md and docs/ say and no other file tests."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from helpers.lab import plain_text
from helpers.tiny_models import tiny_gguf, tiny_llama
from roi_lightning.learning.roi import RoILightningModule
from roi_lightning.models.loading import load_language_model
from roi_lightning.models.source import resolve_model

ROOT = Path(__file__).resolve().parents[1]
DOCS = sorted(str(page.relative_to(ROOT)) for page in ROOT.glob("docs/*.md"))


@pytest.mark.parametrize(("init_std", "flipped"), [(0.01, 0.03), (0.003, 0.0)])
def test_randomness_at_the_start_flips_what_readme_says(init_std, flipped, tmp_path):
    module = RoILightningModule(str(tiny_llama(tmp_path)), prior="magnitude", init_std=init_std)
    module.configure_model()
    module.start.initialise(module, module.sampler)
    masks = {name: (x.to_rows(), module.prior_masks[name].to_rows()) for name, x in module.hard_masks()}
    kept = sum(int(prior.sum()) for _, prior in masks.values())
    lost = sum(int((prior & ~mask).sum()) for mask, prior in masks.values())
    assert lost / kept == pytest.approx(flipped, abs=0.003)


def links_of(page):
    """The links of a page to other files of the repository."""
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", (ROOT / page).read_text())
    return [link for link in links if "://" not in link]


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", *DOCS])
def test_links_lead_somewhere(page):
    assert links_of(page) or page != "README.md", "no link found"
    assert [link for link in links_of(page) if not ((ROOT / page).parent / link).exists()] == []


def headings_of(page):
    """The anchors of a page's headings, as GitHub and MkDocs make them."""
    titles = re.findall(r"^#+ (.*)$", (ROOT / page).read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", *DOCS])
def test_anchors_lead_to_a_heading(page):
    anchors = re.findall(r"\]\(([^):#]*)#([^)]+)\)", (ROOT / page).read_text())
    for target, anchor in anchors:
        assert anchor in headings_of((ROOT / page).parent / target if target else page), (target, anchor)


def test_readme_is_short_and_leads_to_every_page():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150
    assert {*DOCS} <= {*links_of("README.md")}


def test_the_site_has_every_page_in_its_menu():
    menu = re.findall(r"[\w-]+\.md", (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2])
    made_with_the_site = "docs/cli.md"
    assert sorted(f"docs/{page}" for page in menu) == sorted([*DOCS, made_with_the_site])


def test_a_figure_is_written_once():
    """Figures with two decimals are the results page's, and those of README's table and quickstart."""
    results = figures((ROOT / "docs/results.md").read_text())
    readme = (ROOT / "README.md").read_text()
    rest = re.sub(r"^\|.*$", "", readme, flags=re.MULTILINE)
    pages = {page: (ROOT / page).read_text() for page in DOCS if page != "docs/results.md"}
    for page, text in (pages | {"README.md": rest}).items():
        assert not figures(text) & results, page
    for page, text in pages.items():
        assert not [line for line in text.splitlines() if "perplexity" in line and figures(line)], page


def figures(text):
    """Numbers of 10 and above with two decimals."""
    return {*re.findall(r"\d[\d,]*\d\.\d\d\b", text)}


def test_figures_say_at_which_commit_they_were_recorded():
    sections = (ROOT / "docs/results.md").read_text().split("\n## ")
    for section in sections:
        said = re.search(r"ecorded at\s+`[0-9a-f]{7}`", section) or "| recorded at |" in section
        assert not figures(section) or (said and re.search(r"`[0-9a-f]{7}`", section)), section
    shown = (ROOT / "README.md").read_text().partition("## Two commands")[2].partition("\n## ")[0]
    assert re.search(r"`[0-9a-f]{7}`", shown)


def test_a_gguf_file_is_dequantised(tmp_path, monkeypatch):
    """Every matrix in eight bits, as GGUF's own library reads them."""
    kind = gguf.GGMLQuantizationType.Q8_0
    add, plain = gguf.GGUFWriter.add_tensor, {}

    def quantized(writer, name, values):
        if values.ndim == 1:
            return add(writer, name, values)
        packed = gguf.quants.quantize(values, kind)
        plain[name] = torch.from_numpy(np.array(gguf.quants.dequantize(packed, kind)))
        return add(writer, name, packed, raw_dtype=kind)

    monkeypatch.setattr(gguf.GGUFWriter, "add_tensor", quantized)
    lm = load_language_model(resolve_model(str(tiny_gguf(tmp_path / "model.gguf"))))
    names = {"ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj", "attn_v": "self_attn.v_proj"}
    for block in range(2):
        for stored, name in names.items():
            wanted = plain[f"blk.{block}.{stored}.weight"].bfloat16()
            assert torch.equal(lm.get_parameter(f"model.layers.{block}.{name}.weight"), wanted), name
    assert len(plain) == 15


def test_the_quickstart_shows_what_is_done_already(tmp_path):
    """The script in a copy of the repository whose environment is ready and whose run has ended."""
    for name in ("scripts", "pyproject.toml", "constraints.txt"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tmp_path / name)
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (tmp_path / ".venv/bin/python").chmod(0o755)
    wanted = "cat pyproject.toml constraints.txt scripts/environment | cksum > .venv/.ready"
    subprocess.run(["bash", "-c", wanted], cwd=tmp_path, check=True)
    (tmp_path / "runs/quickstart").mkdir(parents=True)
    (tmp_path / "runs/quickstart/summary.json").write_text(
        '{"pattern": "2:4", "steps": 45, "seconds": 237, "perplexity": {"dense": 17.52, "roi": 36.78},'
        ' "zeros": {"prunable": 0.5, "model": 0.395}, "export": "runs/quickstart/export"}'
    )
    command = ["bash", tmp_path / "scripts/quickstart"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    shown = plain_text(done.stdout)
    assert shown.startswith("already done; to run it again: rm -r runs/quickstart")
    assert "held-out perplexity at 2:4: 45 steps, 237 s" in shown
    assert "roi 36.78 2.10 50.0% 39.5%" in shown
    assert not done.stderr
