"""What users write in files of their own: `examples/`, by class path, wherever an option or a function takes it."""

import ast
import json
import re
import runpy
import shlex
import sqlite3
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.study.__main__ import build_parser
from benchmarks.study.cells import choose_methods
from helpers.lab import Lab, brute_top, make_lab, run
from roi_lightning.api import learn, prune
from roi_lightning.cli.arguments import PruneOptions
from roi_lightning.cli.lightning import build
from roi_lightning.cli.options import parse_options
from roi_lightning.data import CalibrationDataModule
from roi_lightning.learning.roi import RoILightningModule
from roi_lightning.masks.mask_set import MaskSet
from roi_lightning.masks.pattern import NMPattern
from roi_lightning.oneshot.config import PruneConfig
from roi_lightning.samplers import Draw
from roi_lightning.samplers.noise import gumbel, noise_key
from roi_lightning.samplers.schedules import Constant

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
PAGE = (ROOT / "docs/extend.md").read_text()
QUICK = {"steps": 2, "seq_len": 32, "batch_size": 2, "accelerator": "cpu", "enable_progress_bar": False}
lab = pytest.fixture(make_lab)


@pytest.fixture(autouse=True)
def _examples_at_hand(monkeypatch):
    """As in a working folder that holds them."""
    monkeypatch.syspath_prepend(EXAMPLES)


def database(lab, column="text"):
    """The lab's corpus as a table of an SQLite file."""
    path = lab.folder / "my.db"
    if not path.exists():
        texts = [json.loads(line)["text"] for line in lab.corpus.read_text().splitlines()]
        with sqlite3.connect(path) as connection:
            connection.execute(f"create table documents (number integer, {column} text)")
            connection.executemany("insert into documents values (?, ?)", enumerate(texts))
    return path


# What the files and the page say can be typed.


def commands():
    """The commands of the examples' docstrings and of the page."""
    texts = [ast.get_docstring(ast.parse(path.read_text())) for path in sorted(EXAMPLES.glob("my_*.py"))]
    texts += re.findall(r"```\w*\n(.*?)```", PAGE, re.DOTALL)
    joined = "\n".join(texts).replace("\\\n", " ")
    return list(
        dict.fromkeys(re.findall(r"^ *((?:roi-lightning|python -m benchmarks).*)$", joined, re.MULTILINE))
    )


def test_every_example_has_a_command_and_a_section():
    named = {path.stem for path in EXAMPLES.glob("my_*.py")}
    assert len(named) == 7
    typed = " ".join(command for command in commands())
    assert all(f"{name}." in typed and f"../examples/{name}.py" in PAGE for name in named)
    assert all(len((EXAMPLES / f"{name}.py").read_text().splitlines()) <= 80 for name in named)
    for name in ("plain_trainer", "own_cli", "my_training_step"):
        shown = PAGE.partition(f"../examples/{name}.py")[2].partition("```python\n")[2].partition("```")[0]
        assert {"", *(EXAMPLES / f"{name}.py").read_text().split("\n")} >= {*shown.split("\n")} > {""}


@pytest.mark.parametrize("command", commands())
def test_commands_are_understood(command, lab, capsys):
    program, name, *words = shlex.split(command)
    if program == "python":
        args = build_parser().parse_args(words[1:])
        assert len(choose_methods(args.methods, args.method)) == 5
    elif name == "prune":
        chosen = PruneConfig(method=parse_options(PruneOptions, "prune", words).method).chosen
        assert (type(chosen).__name__, chosen.exponent) == (
            "PoweredWanda",
            2 if "exponent" in command else 0.5,
        )
    else:
        assert run("fit", *words, "--print_config") == 0
        printed = capsys.readouterr().out
        for path in re.findall(r"my_\w+\.\w+", command.replace("my_texts", "")):
            assert path in printed or path == "my.db", path


# Each example by its own measure.


def test_the_schedule_is_half_a_cosine():
    from my_schedule import Cosine

    schedule = Cosine(start=2.0, end=0.5, fraction=0.8)
    for step in range(26):
        x = min(step / 20, 1.0)
        assert schedule.at(step, 25) == pytest.approx(0.5 + 1.5 * (0.5 + 0.5 * np.cos(np.pi * x)))
    assert (schedule.at(0, 25), schedule.at(10, 25)) == (2.0, pytest.approx(1.25))


@pytest.mark.parametrize(("n", "m"), [(2, 4), (1, 4), (4, 8)])
def test_the_sampler_keeps_n_and_has_the_relaxation_s_gradient(n, m):
    from my_sampler import IndependentPicks

    pattern, draw, sharpness = NMPattern(f"{n}:{m}"), Draw.of(3, 5, "layer", 0.4, 0.7), 1.5
    weight, grad = torch.randn(6, 16), torch.randn(6, 16)
    logits = (0.3 * torch.randn(6, 16)).requires_grad_()
    sampler = IndependentPicks(sharpness)
    drawn = sampler.masked_weight(weight, logits, pattern, draw)
    noise = gumbel(torch.arange(96, dtype=torch.int32), noise_key(3, 5, "layer")).view(6, 16)
    kept = brute_top((logits.detach() / 0.4 + noise), n, m)
    assert torch.allclose(drawn, weight * kept, atol=1e-6)
    (drawn * grad).sum().backward()

    def relaxed(phi):
        keys = (phi / 0.4 + noise.double()).view(-1, m) * sharpness / 0.7
        shares = keys.exp() / keys.exp().sum(1, keepdim=True)
        return float((n * shares * (weight * grad).double().view(-1, m)).sum())

    start = logits.detach().double()
    for place in ((0, 0), (2, 7), (5, 15)):
        change = torch.zeros_like(start)
        change[place] = 1e-5
        slope = (relaxed(start + change) - relaxed(start - change)) / 2e-5
        assert float(logits.grad[place]) == pytest.approx(slope, rel=1e-3, abs=1e-5)


def test_the_learner_passes_the_mask_s_gradient_on(lab):
    from my_learner import ScoreModule

    learner = ScoreModule(str(lab.model), scale=0.5, dtype="float32")
    teacher, student = learner.models()
    tensor = learner.tensors["model.layers.0.mlp.up_proj"]
    scores, dense = tensor.learned["scores"], teacher.model.layers[0].mlp.up_proj.weight
    assert torch.allclose(scores, dense.abs() / 2)
    with torch.no_grad():
        scores.copy_(torch.randn(scores.shape))
    kept, x = brute_top(scores.detach(), 2, 4), torch.randn(3, dense.shape[1])
    learner.fill(learner.draw)
    layer = student.model.layers[0].mlp.up_proj
    out, grad = layer(x), torch.randn(3, len(dense))
    (out * grad).sum().backward()
    assert torch.allclose(out, x @ (dense * kept).T, atol=1e-5)
    assert torch.allclose(scores.grad, (grad.T @ x) * dense, atol=1e-5)
    assert layer.weight.grad is None, "freed"
    assert torch.equal(learner.hard_mask(tensor), kept)


def test_the_method_is_wanda_with_an_exponent(lab):
    from my_method import PoweredWanda

    weight, sums = torch.randn(6, 16), torch.rand(16)
    found = PoweredWanda(2).prune(weight, SimpleNamespace(total=sums), NMPattern("2:4"), "layer").mask
    assert torch.equal(found, brute_top(weight.abs() * sums, 2, 4))
    lm, tokenizer = AutoModelForCausalLM.from_pretrained(lab.model), AutoTokenizer.from_pretrained(lab.model)
    call = partial(prune, lm, tokenizer, str(lab.corpus), windows=3, seq_len=32, device="cpu")
    assert call(method=PoweredWanda(1)).masks.overlap(call(method="wanda").masks).all == 1


def test_a_class_path_prunes_as_the_object_does(lab, half_width):
    half_width(True)
    from my_method import PoweredWanda

    lm, tokenizer = AutoModelForCausalLM.from_pretrained(lab.model), AutoTokenizer.from_pretrained(lab.model)
    chosen = "{class_path: my_method.PoweredWanda, init_args: {exponent: 2}}"
    text = [lab.corpus, "--windows", 3, "--seq_len", 32, "--device", "cpu"]
    assert run("prune", lab.model, "--method", chosen, "--corpora", *text, "--out", "out") == 0
    assert run("verify", "out", "--base", lab.model) == 0
    result = prune(
        lm, tokenizer, str(lab.corpus), method=PoweredWanda(2), windows=3, seq_len=32, device="cpu"
    )
    assert MaskSet.load(lab.folder / "out").overlap(result.masks).all == 1
    made = json.loads((lab.folder / "out/roi_sparsity.json").read_text())["training"]
    assert (made["method"], made["exponent"]) == ("PoweredWanda", 2)


def test_the_corpus_s_windows_hold_the_table_s_text(lab):
    from my_corpus import TableText

    data = TableText(str(lab.model), column="body", corpora=str(database(lab, "body")), seq_len=32)
    tokenizer = AutoTokenizer.from_pretrained(lab.model)
    data.setup("fit")
    joined = "|".join(json.loads(line)["text"] for line in lab.corpus.read_text().splitlines())
    windows = data.windows("train", data.train_tokens // 32)
    pieces = [piece for window in windows for piece in tokenizer.decode(window).split("<|end|>")]
    assert sum(map(len, pieces)) > 5000
    assert all(piece in joined for piece in pieces)
    assert data.val_tokens
    assert {"data.table": "documents", "data.column": "body"}.items() <= data.recipe().items()


# In whole runs.


@pytest.fixture(scope="module")
def combined(tmp_path_factory):
    """A finished run with a schedule, a sampler, a corpus and a callback of one's own."""
    folder = tmp_path_factory.mktemp("combined")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(EXAMPLES)
        made = Lab(folder, tmp_path_factory.getbasetemp() / "lab")
        own = ["--model.tau", "my_schedule.Cosine", "--model.tau.end", "0.1"]
        own += ["--model.sampler", "my_sampler.IndependentPicks", "--model.sampler.sharpness", "2"]
        own += ["--trainer.callbacks+", "my_callback.CrowdedInputs", "--run", "own"]
        own += ["--data", "my_corpus.TableText", "--data.corpora", str(database(made))]
        assert run("fit", *made.quick(*own, max_steps=3)) == 0
        yield made


def test_a_run_with_all_of_them_ends_in_a_verified_export(combined, capsys):
    export = combined.folder / "runs/own/export"
    assert run("verify", export, "--base", combined.model) == 0
    facts = json.loads((export / "roi_sparsity.json").read_text())["training"]
    assert facts["method"] == "independent"
    assert facts["sampler"] == "IndependentPicks(sharpness=2.0)"
    assert facts["tau"] == "Cosine(start=0.2, end=0.1, fraction=0.75)"
    assert facts["text"].endswith("my.db")
    kept = yaml.safe_load((combined.folder / "runs/own/config.yaml").read_text())
    assert kept["data"]["class_path"] == "my_corpus.TableText"
    assert kept["data"]["init_args"]["table"] == "documents"


def test_the_callback_logs_what_the_masks_say(combined):
    events = EventAccumulator(str(combined.folder / "runs/own"), {"scalars": 0}).Reload()
    masks = MaskSet.load(combined.folder / "runs/own/mask.safetensors")
    wanted = {}
    for name, mask in masks.layers.items():
        kind = name.split(".")[-2]
        share = mask.to_bool().numpy().mean(0).max()
        wanted[f"crowded/{kind}"] = max(share, wanted.get(f"crowded/{kind}", 0))
    logged = {
        tag: events.Scalars(tag)[-1].value for tag in events.Tags()["scalars"] if tag.startswith("crowded/")
    }
    assert logged == pytest.approx(wanted)
    (*_, last) = events.Scalars("anneal/tau")
    assert last.value == pytest.approx(0.1)


def test_it_resumes_by_its_own_configuration_alone(combined, capsys):
    config = combined.folder / "runs/own/config.yaml"
    checkpoint = combined.folder / "runs/own/checkpoints/last.ckpt"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(combined.folder)
        words = ["--config", str(config), "--ckpt_path", str(checkpoint)]
        assert run("export", *words, "--out", "again") == 0
        assert (
            run("export", *words, "--data.column", "body", "--model.sampler.sharpness", "3", "--out", "no")
            == 1
        )
    assert "sharpness is 2.0 there and 3.0 here" in capsys.readouterr().err
    again, first = (MaskSet.load(combined.folder / x) for x in ("again", "runs/own/export"))
    assert again.overlap(first).all == 1


def test_a_learner_of_one_s_own_ends_as_the_others_do(lab):
    own = ["--model", "my_learner.ScoreModule", "--model.scale", "0.001", "--run", "own"]
    assert run("fit", *lab.quick(*own, max_steps=3)) == 0
    assert run("verify", "runs/own/export", "--base", lab.model) == 0
    masks = MaskSet.load(lab.folder / "runs/own/mask.safetensors")
    assert masks.kept * 2 == masks.total
    facts = json.loads((lab.folder / "runs/own/export/roi_sparsity.json").read_text())["training"]
    assert (facts["learner"], facts["method"], facts["scale"]) == ("ScoreModule", "scores", 0.001)
    summary = json.loads((lab.folder / "runs/own/summary.json").read_text())
    assert list(summary["perplexity"]) == ["dense", "magnitude", "scores"]
    weights = AutoModelForCausalLM.from_pretrained(lab.model)
    changed = sum(
        int((mask.to_bool() != brute_top(weights.get_parameter(name).abs(), 2, 4)).sum())
        for name, mask in masks.layers.items()
    )
    assert changed, "three steps from scores so near to each other"


@pytest.mark.filterwarnings("ignore:.*does not have many workers", "ignore:The number of training batches")
def test_lightning_s_own_trainer_and_command_line_write_masks(lab, monkeypatch):
    (lab.folder / "my_model_dir").symlink_to(lab.model)
    (lab.folder / "my_texts").mkdir()
    for i, line in enumerate(lab.corpus.read_text().splitlines()):
        (lab.folder / f"my_texts/{i}.txt").write_text(json.loads(line)["text"])
    learner = runpy.run_path(str(EXAMPLES / "plain_trainer.py"))["module"]
    facts = json.loads((lab.folder / "runs/plain/export/roi_sparsity.json").read_text())["training"]
    assert (facts["tokens"], facts["sampler"]) == (10 * 4 * 128, "StraightThrough(push_down='paper')")
    assert run("verify", "runs/plain/export", "--base", lab.model) == 0
    again = RoILightningModule.load_from_checkpoint(*lab.folder.glob("runs/plain/**/*.ckpt")).mask_set()
    for masks in (again, learner.mask_set()):
        assert masks.overlap(MaskSet.load(lab.folder / "runs/plain/mask.safetensors")).all == 1
    words = "own_cli.py fit --model.lm=my_model_dir --data.corpora=my_texts/*.txt --data.seq_len=128 "
    words += "--seed_everything=0 --trainer.max_steps=2 --trainer.callbacks=HardenMasks"
    monkeypatch.setattr(sys, "argv", words.split())
    runpy.run_path(str(EXAMPLES / "own_cli.py"), run_name="__main__")
    assert MaskSet.load(lab.folder / "mask.safetensors").base.spec == "my_model_dir"


def test_a_training_step_of_one_s_own_adds_its_gradient(lab):
    from my_training_step import Penalised

    def kept(penalty):
        learner, fitter = lab.learn(3, kind=Penalised, penalty=penalty, patterns={"k_proj": "1:4"}, tau=0.2)
        fitter.save_checkpoint("own.ckpt")
        again = Penalised.load_from_checkpoint("own.ckpt")
        assert (again.penalty, again.tau, str(again.pattern)) == (penalty, Constant(0.2), "1:4 + 2:4")
        assert again.mask_set().overlap(learner.mask_set()).all == 1
        return sum(float(learner.hard_weight(x).square().sum()) for x in learner.tensors.values())

    assert kept(100.0) > 1.05 * kept(0.0)


# From Python.


def test_learn_takes_a_learner_and_a_corpus_with_options_of_their_own(lab):
    from my_corpus import TableText
    from my_learner import ScoreModule

    lm, tokenizer = AutoModelForCausalLM.from_pretrained(lab.model), AutoTokenizer.from_pretrained(lab.model)
    call = partial(learn, lm, tokenizer, learner=partial(ScoreModule, scale=0.001), **QUICK)
    masks = call(str(database(lab)), data=partial(TableText, table="documents"))
    assert masks.kept * 2 == masks.total
    assert masks.overlap(call(str(lab.corpus))).all == 1
    assert masks.overlap(call(str(lab.corpus), learner=ScoreModule)).all < 1, "at another scale"


# The section `data`, with and without a class.


PLAIN = "data: {corpora: CORPUS, seq_len: 16, val_windows: 3}\n"
CLASS = (
    "data: {class_path: CalibrationDataModule, init_args: {corpora: CORPUS, seq_len: 16, val_windows: 3}}\n"
)
OWN = "data: {class_path: my_corpus.TableText, init_args: {corpora: CORPUS, seq_len: 16, val_windows: 3}}\n"


@pytest.mark.parametrize(
    ("files", "words", "kind", "seq_len"),
    [
        ([PLAIN], [], "CalibrationDataModule", 16),
        ([CLASS], [], "CalibrationDataModule", 16),
        ([OWN], [], "TableText", 16),
        ([PLAIN], ["--data.seq_len", "8"], "CalibrationDataModule", 8),
        ([OWN, "data: {seq_len: 24}\n"], [], "TableText", 24),
        ([PLAIN], ["--data.seq_len", "8", "--data", "my_corpus.TableText"], "TableText", 8),
        ([], ["--data.corpora", "CORPUS", "--data.val_windows", "3"], "CalibrationDataModule", 1024),
    ],
)
def test_data_is_plain_or_a_class(lab, files, words, kind, seq_len):
    paths = [lab.folder / f"{i}.yaml" for i, _ in enumerate(files)]
    for path, content in zip(paths, files, strict=True):
        path.write_text(content.replace("CORPUS", str(lab.corpus)))
    options = [word.replace("CORPUS", str(lab.corpus)) for word in words]
    configs = [word for path in paths for word in ("--config", str(path))]
    common = ["--model.lm", str(lab.model), "--trainer.max_steps", "1", "--trainer.logger", "false"]
    data = build([*common, "--seed_everything", "7", *configs, *options]).datamodule
    assert type(data).__name__ == kind
    assert (data.seq_len, data.val_windows, data.corpora[0].source) == (seq_len, 3, str(lab.corpus))
    assert (data.tokenizer, data.seed) == (str(lab.model), 7), "linked to the model and the seed"
    assert isinstance(data, CalibrationDataModule)
