"""What another package registers: classes by short name, methods, commands, formats of directories."""

import json

import pytest
import yaml

from helpers.lab import make_lab, run
from roi_lightning.export.sidecar import heading, write_sidecar
from roi_lightning.utils.entry_points import added

lab = pytest.fixture(make_lab)
ENTRY_POINTS = """
[roi_lightning.classes]
SlowModule = other_package:SlowModule
everyother = other_package:EveryOther
[roi_lightning.commands]
greet = other_package.greeting:main
broken = other_package.nowhere:main
[roi_lightning.formats]
other.format = other_package:FORMAT
"""
PACKAGE = """
import torch
from roi_lightning.export import Check, VerifyReport
from roi_lightning.export.formats import DirectoryFormat
from roi_lightning.learning.roi import RoILightningModule
from roi_lightning.oneshot import LayerResult, OneShotMethod

class SlowModule(RoILightningModule):
    pass

class EveryOther(OneShotMethod):
    def prune(self, weight, inputs, pattern, name):
        mask = torch.zeros_like(weight, dtype=torch.bool)
        mask[:, ::2] = True
        return LayerResult(mask)

FORMAT = DirectoryFormat(lambda directory, base: VerifyReport(directory, [Check("other", False, "never holds")]))
"""
GREETING = """
'''`greet NAME`: a friendly word.'''

import torch

def main(argv):
    print("hello", *argv)
    return 0
"""


@pytest.fixture(autouse=True, scope="module")
def other_package(tmp_path_factory):
    site = tmp_path_factory.mktemp("site")
    folder, facts = site / "other_package", site / "other_package-1.0.dist-info"
    folder.mkdir(parents=True)
    facts.mkdir()
    (folder / "__init__.py").write_text(PACKAGE)
    (folder / "greeting.py").write_text(GREETING)
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: other_package\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text(ENTRY_POINTS)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(site)
        added.cache_clear()
        yield
    added.cache_clear()


def test_its_commands_run_and_stand_below_the_line_unimported(capsys):
    assert run("--help") == 0
    core, _, beside = capsys.readouterr().out.partition("\n---\n")
    assert "  greet      a friendly word\n" in beside
    assert "  pack " in beside
    assert "greet" not in core
    assert run("greet", "you") == 0
    assert capsys.readouterr().out == "hello you\n"
    assert run("greeet") == 2
    assert "did you mean greet?" in capsys.readouterr().err
    assert run("broken") == 1
    assert "error: 'broken' is registered as 'other_package.nowhere:main'" in capsys.readouterr().err


@pytest.mark.parametrize("way", ["command line", "file"])
def test_its_classes_have_short_names(lab, way, tmp_path, capsys):
    file = tmp_path / "its.yaml"
    file.write_text("model: SlowModule\n")
    words = {"command line": ["--model", "SlowModule"], "file": ["--config", file]}[way]
    assert run("fit", *words, "--model.lm", lab.model, "--print_config") == 0
    config = yaml.safe_load(capsys.readouterr().out)
    assert config["model"]["class_path"] == "other_package.SlowModule"


def test_its_methods_prune(lab, tmp_path):
    assert run("prune", lab.model, "--method", "everyother", "--out", tmp_path / "out") == 0
    assert run("verify", tmp_path / "out", "--base", lab.model) == 0


def test_its_directories_verify_by_its_own_rules(tmp_path, capsys):
    folder = tmp_path / "directory"
    folder.mkdir()
    write_sidecar(folder, heading("other.format"))
    assert run("verify", folder) == 1
    assert "never holds" in capsys.readouterr().out


def test_its_compressed_models_are_no_base(lab, tmp_path, capsys):
    folder = tmp_path / "directory"
    folder.mkdir()
    config = {"model_type": "llama", "quantization_config": {"quant_method": "other.format"}}
    (folder / "config.json").write_text(json.dumps(config))
    assert run("prune", folder, "--method", "magnitude", "--out", tmp_path / "out") == 1
    assert "holds weights as other.format" in capsys.readouterr().err
