"""Options and environment of the test suite: no network, one thread, no state that leaks, real data where it lies."""

import gc
import logging
import os
import random
import sys
import time
from pathlib import Path

import pytest

# Before torch is imported, and for child processes. Tiny tensors gain nothing from threads, and lose much where other
# work waits for the same cores.
os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))  # for `benchmarks`
CACHE = REPOSITORY / ".pytest_cache"
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(CACHE / "inductor"))
# Child processes take warnings for errors, too, except those that pyproject.toml explains and Lightning's remarks.
REMARKS = (
    "`isinstance(treespec:FutureWarning",
    ":DeprecationWarning",
    "The dirpath has changed",
    "Be aware that when",
    "Experiment logs directory",
)
REMARKS += "The 'train_dataloader' does not have many", "The 'val_dataloader' does not have many"
os.environ["PYTHONWARNINGS"] = ",".join(["error", *(f"ignore:{remark}" for remark in REMARKS)])

# What takes longest comes first, so that no worker is left alone with it at the end.
LONG = (
    "test_distributed",
    "test_eight_bit",
    "test_cpu_kernels",
    "test_bad_configs",
    "test_plan",
    "test_architectures",
    "test_hub",
    "test_triton",
    "test_compare",
    "test_bad_models",
    "test_harness",
    "test_bad_corpora",
    "test_categorical",
    "test_code_blocks",
)


def pytest_addoption(parser):
    parser.addoption(
        "--roi-data", default=os.environ.get("ROI_DATA"), help="folder with real text (or ROI_DATA)"
    )
    parser.addoption(
        "--half_width",
        choices=["yes", "no"],
        help="what to believe of instructions for bf16 and fp16 in this CPU",
    )


def is_default(config):
    """Whether what runs was not chosen by mark."""
    return config.option.markexpr == "not slow"


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: item.path.stem not in LONG)
    for item in items:
        if item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.timeout(3600))


def pytest_collection_finish():
    """What is imported by now stays: the garbage collector needs not go through it again and again."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish():
    gc.unfreeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol():
    """The same random numbers for every test, and what it changed for the whole process changed back."""
    import numpy as np
    import torch
    from lightning.pytorch.utilities import rank_zero_only

    from roi_lightning.utils.progress import Lines

    loggers = [logging.getLogger(name) for name in [*logging.root.manager.loggerDict]]
    levels = [logger.level for logger in loggers]
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002
    torch.manual_seed(0)
    Lines._written = time.monotonic()  # or a line would be due soon after a long test
    try:
        return (yield)
    finally:
        torch.set_num_threads(1)
        torch.set_flush_denormal(False)
        rank_zero_only.rank = 0
        for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):
            os.environ.pop(name, None)
        for logger, level in zip(loggers, levels, strict=True):
            if logger.level != level:  # setting one goes through the caches of all
                logger.setLevel(level)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    """In CI nothing is skipped by accident, only for want of a GPU or of real text where nobody asked for these."""
    report = yield
    asked = item.config.option.markexpr
    no_gpu = "gpu" in item.keywords and "gpu" not in asked
    no_text = "roi_data" in item.fixturenames and is_default(item.config)
    return report if no_gpu or no_text else _never_skipped(report)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report():
    """The same for whole files."""
    return _never_skipped((yield))


def _never_skipped(report):
    if os.environ.get("CI") and report.skipped and not hasattr(report, "wasxfail"):
        report.outcome, report.longrepr = "failed", f"skipped in CI: {report.longrepr[-1]}"
    return report


@pytest.fixture
def roi_data(request):
    folder = request.config.getoption("--roi-data")
    if not folder or not Path(folder).is_dir():
        pytest.skip("no real text: give --roi-data FOLDER or set ROI_DATA")
    return Path(folder)


@pytest.fixture
def one_rank():
    """A process group of this process alone."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(autouse=True, scope="session")
def _half_width(pytestconfig):
    """What `compute_dtype` is told of this CPU, where it is given: tests on one machine see both."""
    if answer := pytestconfig.getoption("--half_width"):
        import torch

        able = _capabilities(answer == "yes")
        torch.cpu.get_capabilities = lambda: able


@pytest.fixture
def half_width(monkeypatch):
    """Call it with whether this CPU is to have instructions for bf16 and fp16."""
    import torch

    from roi_lightning.models import config

    def pretend(answer):
        able = _capabilities(answer)
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: able)
        config._is_slow.cache_clear()

    yield pretend
    config._is_slow.cache_clear()


def _capabilities(half_width):
    import torch

    from roi_lightning.models import config

    names = {name for of_dtype in config._INSTRUCTIONS.values() for name in of_dtype}
    return torch.cpu.get_capabilities() | dict.fromkeys(names, half_width)


@pytest.fixture(autouse=True, scope="session")
def _own_cache(tmp_path_factory):
    """Prepared data stays out of the user's cache, compiled libraries stay for the next run, disks don't wait."""
    import datasets

    from roi_lightning.utils.cpp_extension import cache_folder

    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:  # one for all workers
        folder = folder.parent
    os.fsync = lambda handle: None  # no test pulls the plug
    # Named by all that they are made of, so that any checkout may take them.
    os.environ["ROI_CACHE"] = str((cache_folder() or CACHE) / "tests")
    datasets.config.HF_DATASETS_CACHE = folder / "datasets"
