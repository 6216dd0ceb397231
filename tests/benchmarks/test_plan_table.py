"""The table of what the configurations take: models of the published sizes, and a page that says what `plan` says."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.plan_table import architecture, configurations, gpu_row, published_count, row, shapes
from helpers.lab import make_lab
from roi_lightning.cli.config_files import shipped_configs

lab = pytest.fixture(make_lab)
PAGE = Path(__file__).parents[2] / "docs/configurations.md"
# One that is tied and small, one with eager attention, one whose head is a matrix of its own.
CHECKED = ["smollm2_135m_2of4", "gemma2_9b_2of4", "qwen7b_2of4"]


@pytest.mark.parametrize("lm", shapes())
def test_models_have_the_published_number_of_parameters(lm):
    with torch.device("meta"):
        built = AutoModelForCausalLM.from_config(architecture(lm))
    assert sum(parameter.numel() for parameter in built.parameters()) == published_count(lm)


def test_every_configuration_is_on_the_page():
    said = PAGE.read_text()
    assert set(configurations().values()) == set(shapes())
    for name in {path.stem for path in shipped_configs().glob("*_2of4.yaml")}:
        assert f"| `{name}` |" in said
    for path in shipped_configs().glob("*_2of8.yaml"):
        assert f"extends: {path.stem.removesuffix('8')}4.yaml\n" in path.read_text(), (
            "and takes what that takes"
        )


@pytest.mark.slow
@pytest.mark.parametrize("name", CHECKED)
def test_the_page_says_what_plan_says(lab, name):
    for cells in row(name), gpu_row(name):
        assert f"| {' | '.join(cells)} |\n" in PAGE.read_text()
