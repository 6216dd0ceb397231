"""What arrives at each logger, read back by its own means: the table of docs/monitoring.md."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from jsonargparse import Namespace
from lightning.pytorch.loggers import TensorBoardLogger, WandbLogger
from lightning.pytorch.loggers.logger import DummyLogger
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from helpers.lab import make_lab
from roi_lightning.cli.lightning import build
from roi_lightning.cli.log_folders import with_log_folders
from roi_lightning.errors import UserError
from roi_lightning.learning.callbacks.monitor import (
    log_histogram,
    log_hyperparameters,
    log_picture,
    mask_tile,
)
from roi_lightning.masks.layer_mask import LayerMask

lab = pytest.fixture(make_lab)
VALUES = torch.linspace(-1, 3, 1000)
PICTURE = mask_tile(LayerMask.from_rows(torch.arange(64).view(8, 8) % 2 == 0))
SETTINGS = {"model.lm": "tiny", "model.tau.end": 0.05, "model.ignore": ["head"], "data.revision": None}


def log_everything(logger):
    log_hyperparameters([logger], SETTINGS)
    logger.log_metrics({"train/loss": 2.5}, 3)
    log_histogram([logger], "logits/q_proj", VALUES, 3)
    log_picture([logger], "mask/q_proj", PICTURE, 3)
    logger.finalize("success")


def same_picture(path):
    return np.array_equal(np.asarray(Image.open(path).convert("L")), PICTURE[0].numpy())


def test_tensorboard(tmp_path):
    logger = TensorBoardLogger(tmp_path, name="", version="", default_hp_metric=False)
    logger.save()  # as Lightning does before a run's settings are known
    log_everything(logger)
    events = EventAccumulator(str(tmp_path), {"scalars": 0, "images": 0, "histograms": 0, "tensors": 0})
    events.Reload()
    assert [(x.step, x.value) for x in events.Scalars("train/loss")] == [(3, 2.5)]
    assert "val/perplexity" not in events.Tags()["scalars"], "nothing was measured yet"
    histogram = events.Histograms("logits/q_proj")[0].histogram_value
    assert (histogram.num, histogram.min, histogram.max) == (1000, -1, 3)
    (tmp_path / "picture.png").write_bytes(events.Images("mask/q_proj")[0].encoded_image_string)
    assert same_picture(tmp_path / "picture.png")
    table = {
        tag: HParamsPluginData.FromString(events.SummaryMetadata(f"_hparams_/{tag}").plugin_data.content)
        for tag in ("experiment", "session_start_info")
    }
    (result,) = table["experiment"].experiment.metric_infos
    assert result.name.tag == "val/perplexity"
    shown = table["session_start_info"].session_start_info.hparams
    assert (shown["model.lm"].string_value, shown["model.tau.end"].number_value) == ("tiny", 0.05)
    assert (shown["model.ignore"].string_value, shown["data.revision"].string_value) == ("['head']", "None")
    assert yaml.safe_load((tmp_path / "hparams.yaml").read_text()) == SETTINGS


def test_a_logger_of_another_kind_gets_scalars_and_settings():
    got = []

    class Other(DummyLogger):
        def log_metrics(self, metrics, step):
            got.append((metrics, step))

        def log_hyperparams(self, settings):
            got.append(settings)

    log_everything(Other())
    assert got == [SETTINGS, ({"train/loss": 2.5}, 3)]


def test_wandb_gets_histograms_and_pictures():
    wandb = pytest.importorskip("wandb")
    got = {}

    class Offline(WandbLogger):
        def __init__(self):
            pass

        def log_metrics(self, metrics, step):
            got.update(metrics)

        def log_image(self, tag, images, step):
            got[tag] = images

    log_histogram([Offline()], "logits/q_proj", VALUES, 3)
    log_picture([Offline()], "mask/q_proj", PICTURE, 3)
    assert isinstance(got["logits/q_proj"], wandb.Histogram)
    assert np.array_equal(got["mask/q_proj"][0], PICTURE[0].numpy())


def test_a_logger_that_names_no_folder_writes_into_the_run_s(lab):
    two = "[{class_path: CSVLogger}, {class_path: TensorBoardLogger, init_args: {save_dir: there}}]"
    start = ["-c", "quickstart.yaml", "--model.lm", "smollm2-135m", "--run", "a"]
    cli = build([*start, f"--trainer.logger={two}"])
    folders = [Path(logger.log_dir) for logger in cli.trainer.loggers]
    assert folders == [lab.folder / "runs/a/lightning_logs/version_0", Path("there/lightning_logs/version_0")]
    said = cli.config["trainer"]["logger"][0]["init_args"]["save_dir"]
    assert said is None, "in config.yaml, by which a run may continue elsewhere"


@pytest.mark.parametrize(
    ("kind", "given", "filled"),
    [
        ("WandbLogger", {"save_dir": None, "name": "mine"}, {"save_dir": "/runs/a", "name": "mine"}),
        ("CSVLogger", {"save_dir": "there"}, {"save_dir": "there"}),
        ("my.Logger", {"key": None}, {"key": None}),
    ],
)
def test_what_other_loggers_are_given(monkeypatch, kind, given, filled):
    monkeypatch.setattr("roi_lightning.cli.log_folders.require", lambda *args: None)
    logger = Namespace(class_path=kind, init_args=Namespace(**given))
    assert with_log_folders(logger, Path("/runs/a"))["init_args"].as_dict() == filled
    assert logger["init_args"].as_dict() == given
    assert with_log_folders(False, Path("/runs/a")) is False


def test_a_logger_whose_package_is_missing_names_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(
        UserError, match=r"WandbLogger needs wandb; run `pip install 'roi-lightning\[wandb\]'`"
    ):
        with_log_folders(Namespace(class_path="x.WandbLogger", init_args=Namespace()), Path("a"))
