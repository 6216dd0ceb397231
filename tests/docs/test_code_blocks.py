"""Every code block of README.md and docs/ runs on a tiny model, or says why it can't."""

import gzip
import json
import re
import shutil
import sqlite3
import warnings
from contextlib import closing
from importlib import import_module
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from docs.count_commands import ROOT, blocks_of, commands_of, count, pages
from helpers.lab import make_lab, run
from helpers.tiny_models import tiny_qwen2
from roi_lightning.cli import arguments
from roi_lightning.cli.options import parse_options

lab = pytest.fixture(make_lab)
CONFIGURED = ("fit", "validate", "export", "plan")
# Options of which a tiny run takes other values, and what they are; given or not.
SMALL = {
    "fit": {
        ("--model.lm", "--lm"): "my_model_dir",
        ("--data.corpora", "--corpora"): "my_texts/*.txt",
        ("--data.seq_len", "--seq_len"): "32",
        ("--trainer.max_steps", "--steps"): "2",
        ("--data.batch_size",): "2",
        ("--data.windows_per_step",): "2",
        ("--data.val_windows",): "2",
        ("--data.held_out_fraction",): "0.2",
        ("--trainer.accelerator",): "cpu",
    },
    "prune": {
        ("--corpora",): "my_texts/*.txt",
        ("--seq_len",): "32",
        ("--windows",): "4",
        ("--device",): "cpu",
    },
    "evaluate": {("--seq_len",): "32", ("--limit",): "4", ("--device",): "cpu"},
}
SMALL |= dict.fromkeys(("plan", "validate", "export"), SMALL["fit"])
SLOW = (
    "docs/baselines.md",
    "docs/configurations.md",
    "docs/contrib.md",
    "docs/data.md",
    "docs/deploy.md",
    "docs/evaluation.md",
    "docs/extend.md",
    "docs/monitoring.md",
    "docs/training.md",
)  # many runs
PAGES = [
    pytest.param(page, marks=pytest.mark.slow if page in SLOW else ())
    for page in pages()
    if any(map(commands_of, blocks_of(page)))
]
# What blocks take for granted, made by other blocks.
PREPARED = (
    "fit --config quickstart.yaml",
    "prune smollm2-135m --method sparsegpt --out runs/sparsegpt --windows 4 --seq_len 32 --corpora my_book.txt",
)


def small(arguments):
    """The arguments with which a documented command runs on the tiny model."""
    words = ["my_model_dir" if word == "smollm2-135m" else word for word in arguments]
    for names, value in options_of_small(words).items():
        given = next((name for name in names if name in words), None)
        if given is None:
            words += [names[0], value]
        elif given not in ("--lm", "--model.lm", "--corpora", "--data.corpora"):
            words[words.index(given) + 1] = value
    # Commands that a page shows as alternatives may name one run.
    return [*words, "--overwrite"] if words[0] == "fit" and "--resume" not in words else words


def options_of_small(words):
    """Which options of a command have values for tiny runs."""
    options = dict(SMALL.get(words[0], {}))
    if words[0] in CONFIGURED and "--model" not in words and "recover.yaml" not in words:
        prox = any("proxsparse" in word for word in words)
        options |= {("--model.strength",): "1"} if prox else {("--model.prior_windows",): "2"}
    return {} if "magnitude" in words else options


def _value(words, name):
    return words[words.index(name) + 1] if name in words else None


def write_texts(folder):
    """The files that pages name as the reader's own, in words that a tiny run can learn from."""
    words = [" ".join(f"word{(i * k) % 97}" for i in range(1, 60)) for k in range(1, 61)]
    for name in ("my_texts", "shelf"):
        (folder / name).mkdir()
        for number, text in enumerate(words):
            (folder / name / f"{number}.txt").write_text(text)
    (folder / "my_book.txt").write_text("\n\n".join(words))
    rows = "".join(json.dumps({"text": text, "body": text}) + "\n" for text in words)
    (folder / "notes.jsonl.gz").write_bytes(gzip.compress(rows.encode()))
    with closing(sqlite3.connect(folder / "my.db")) as table, table:
        table.execute("create table documents (body text)")
        table.executemany("insert into documents values (?)", [(text,) for text in words])


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """A folder with a tiny model, text, and what earlier pages made."""
    folder = tmp_path_factory.mktemp("reader")
    tiny_qwen2(folder / "my_model_dir", max_position_embeddings=4096)
    write_texts(folder)
    for example in ROOT.glob("examples/*.py"):
        shutil.copy(example, folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for command in PREPARED:
            assert run(*small(command.split())) == 0, command
    return folder


def treat(command, names):
    """Do with a command what its block asks for."""
    if command.treatment == "run":
        execute(command, names)
    elif command.treatment == "parsed":
        parse(command)
    else:
        assert command.treatment == "marked", "not run; say why: <!-- not run: the reason -->"


def execute(command, names):
    """Run a command as a reader would, in the working folder."""
    block = command.block
    if block.mark == "tested by":
        assert (ROOT / block.note).is_file(), f"{block.note} does not exist"
    elif block.kind == "python":
        exec(compile(block.text, f"{block.page}:{block.line}", "exec"), names)
    else:
        arguments = small(command.arguments)
        if out := _value(arguments, "--out"):
            shutil.rmtree(out, ignore_errors=True)
        assert run(*arguments) == 0


def parse(command):
    """Have a command's own parser read what can't be run here."""
    if command.block.kind == "yaml":
        Path("block.yaml").write_text(command.text)
        overlaid = ["fit", "--config", "quickstart.yaml", "--config", "block.yaml"]
        assert run(*overlaid, "--print_config") == 0
    elif command.arguments is None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of TensorBoard's own libraries
            import_module("tensorboard.program").TensorBoard().configure(command.text.split())
    elif command.arguments[0] in CONFIGURED:
        assert run(*command.arguments, "--print_config") == 0
    else:
        name, *rest = command.arguments
        assert parse_options(getattr(arguments, f"{name.title()}Options"), name, rest)


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.filterwarnings(r"ignore:`torch.jit.script_method` is deprecated")  # by what compiles AdamW8bit
def test_the_commands_of_a_page_work(lab, prepared, page, monkeypatch, capsys):
    shutil.copytree(prepared, lab.folder / "reader")
    monkeypatch.chdir(lab.folder / "reader")
    monkeypatch.syspath_prepend(str(lab.folder / "reader"))
    names = {"__name__": "block"}
    for block in blocks_of(page):
        for command in commands_of(block):
            try:
                treat(command, names)
            except (Exception, SystemExit) as error:
                where = f"{page}:{block.line}: {command.text.strip()}"
                raise AssertionError(f"{where}\n{capsys.readouterr().err}") from error


def test_every_block_is_understood():
    """A block has a language that is known here, or is one that shows output."""
    unknown = [
        f"{block.page}:{block.line}"
        for page in pages()
        for block in blocks_of(page)
        if block.kind == "unknown"
    ]
    assert unknown == []
    assert sum(found["unknown"] for found in count().values()) == 0


def test_the_tags_of_the_monitoring_page_are_those_of_a_run(prepared):
    documented = re.findall(
        r"`(\w+/\w+|lr)`", (ROOT / "docs/monitoring.md").read_text().partition("## Masks")[0]
    )
    events = EventAccumulator(str(prepared / "runs/quickstart"))
    events.Reload()
    assert {*documented} == {*events.Tags()["scalars"]} - {"epoch"}
