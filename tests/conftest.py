"""Options and environment of the test suite: no network, real data only where it is pointed to."""

import os
from pathlib import Path

import pytest
import torch

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# Tiny tensors gain nothing from threads, and lose much where other work waits for the same cores.
torch.set_num_threads(1)


def pytest_addoption(parser):
    parser.addoption(
        "--roi-data", default=os.environ.get("ROI_DATA"), help="folder with real text (or ROI_DATA)"
    )


# What takes longest comes first, so that no worker is left alone with it at the end.
LONG = (
    "test_survive",
    "test_study",
    "test_slurm",
    "test_distributed",
    "test_triton",
    "test_compiled",
    "test_native",
)


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: item.path.stem not in LONG)


@pytest.fixture
def roi_data(request):
    folder = request.config.getoption("--roi-data")
    if not folder or not Path(folder).is_dir():
        pytest.skip("no real text: give --roi-data FOLDER or set ROI_DATA")
    return Path(folder)


@pytest.fixture(autouse=True, scope="session")
def _own_cache(tmp_path_factory):
    """Prepared data of tests stays out of the user's cache."""
    import datasets

    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:  # one for all workers: what one has compiled the others need not
        folder = folder.parent
    os.environ["ROI_CACHE"] = str(folder / "libraries")
    datasets.config.HF_DATASETS_CACHE = folder / "datasets"
