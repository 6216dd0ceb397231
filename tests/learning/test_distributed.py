"""Two processes learn what one does with the same text and draws, and either goes on from the other's checkpoint."""

import csv
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from helpers.distributed_worker import REPORTED, SAVED, STEPS, TOLD, learn, learned_of
from helpers.lab import GOING_ON, Lab, make_lab, plain_text, run
from helpers.tiny_models import random_masks, tiny_gpt2, tiny_llama, tiny_mixtral
from roi_lightning.errors import UserError
from roi_lightning.export import verify_export, write_export
from roi_lightning.learning.checkpoint_io import read_checkpoint
from roi_lightning.learning.resume import check_checkpoint
from roi_lightning.masks.mask_set import MaskSet
from roi_lightning.models.source import resolve_model

lab = pytest.fixture(make_lab)
TESTS = Path(__file__).parents[1]
# What is learned, on which model: the tiny Llama where it says nothing of one.
KINDS = {"llama": "roi", "step": "step", "gpt2": "step", "mixtral": "roi", "mixtral-step": "step"}
KINDS |= {"maskllm": "maskllm", "maskpro": "maskpro", "proxsparse": "proxsparse"}
KINDS |= {"joint": "joint", "joint-step": "joint-step", "recover": "recover"}
SLOW_KINDS = [kind for kind in KINDS if kind not in ("llama", "step", "maskllm")]
MEASURED = ["ddp-measured", "sharded-measured"]
WHOLE = ["ddp-llama", "sharded-step", "sharded-gpt2", "ddp-mixtral", "sharded-mixtral-step"]
WHOLE += ["ddp-step", "sharded-maskllm", "ddp-maskpro", "sharded-maskpro", "sharded-proxsparse"]
WHOLE += ["ddp-joint", "sharded-joint-step", "ddp-recover", "sharded-recover"]
# Resumed runs: from a file of one process, and from a folder of shards.
ON = {"ddp-on": "one-llama", "sharded-on": "one-step", "sharded-shards": "sharded-step"}
SLOW = {
    "sharded-gpt2",
    "ddp-mixtral",
    "sharded-mixtral-step",
    "ddp-maskpro",
    "sharded-maskpro",
}
SLOW |= {
    "ddp-on",
    "sharded-on",
    "sharded-proxsparse",
    "ddp-joint",
    "sharded-joint-step",
    "ddp-recover",
    "sharded-recover",
}
MAKERS = {"llama": tiny_llama, "mixtral": tiny_mixtral, "gpt2": tiny_gpt2}
pytestmark = [
    *GOING_ON,
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:The dirpath has changed"),
    pytest.mark.filterwarnings("ignore:the first draws keep"),
]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Folders of runs by name: `one` in this process, the others on two ranks."""
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("distributed")
    Lab(root, root / "shared")
    learn_alone(root, [kind for kind in KINDS if kind not in SLOW_KINDS])
    names = [name for name in (*WHOLE, *ON, *MEASURED) if name not in SLOW]
    spread(root, {"specs": [spec_of(root, name) for name in names], "all": True})
    return root


@pytest.fixture(scope="module")
def slow_root(root):
    """The same with the runs of slow tests."""
    learn_alone(root, SLOW_KINDS)
    spread(root, {"specs": [spec_of(root, name) for name in (*WHOLE, *ON) if name in SLOW]})
    return root


@pytest.fixture
def runs(request, root):
    """Folders of runs; those of slow tests only where the test is of one."""
    of = getattr(request.node, "callspec", None)
    return request.getfixturevalue("slow_root") if of and of.params.get("name") in SLOW else root


def each(*names):
    """The tests of runs by name, some of them slow."""
    marks = [[pytest.mark.slow] if name in SLOW else [] for name in names]
    return pytest.mark.parametrize(
        "name", [pytest.param(name, marks=mark) for name, mark in zip(names, marks, strict=True)]
    )


def learn_alone(root, kinds):
    for kind in kinds:
        model = kind.removesuffix("-step")
        if model in MAKERS and not (root / model).exists():
            MAKERS[model](root / model)
        if kind == "recover":
            source = resolve_model(str(root / "llama"))
            write_export(source, random_masks(source, "2:4"), root / kind)
        folder = root / f"one-{kind}"
        module, recorder, _ = learn(model_of(root, kind), folder, root / "shared", learner=KINDS[kind])
        torch.save(learned_of(module), folder / "learned.pt")
        (folder / "rank0.json").write_text(json.dumps({"losses": recorder.losses, "held": {}}))


def spec_of(root, name):
    """What ranks do to make a run of this name."""
    strategy, _, kind = name.partition("-")
    start = ON.get(name)
    return {
        "folder": root / name,
        "strategy": strategy,
        "model": model_of(root, kind),
        "windows": 4,
        "learner": "measured" if name in MEASURED else KINDS[truth_of(name).removeprefix("one-")],
        "ckpt_path": start and root / start / "checkpoints" / f"step={SAVED}.ckpt",
    }


def model_of(root, kind):
    model = root / kind.partition("-")[0]
    return model if model.is_dir() else root / "llama"


def spread(root, work, ranks=2):
    (root / "work.json").write_text(json.dumps(work, default=lambda path: str(path)))
    command = [
        sys.executable,
        str(TESTS / "helpers" / "distributed_worker.py"),
        str(root / "work.json"),
        str(ranks),
    ]
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path]),
    }
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-20_000:]


def truth_of(name):
    """The run of one process that another one should be like."""
    kind = name.partition("-")[2]
    return f"one-{kind if kind in KINDS else 'llama' if name.startswith('ddp') else 'step'}"


def begun_at(name):
    return SAVED if name in ON else 0


def saved(folder):
    return torch.load(folder / "learned.pt", weights_only=True)


def losses_of(folder):
    files = sorted(folder.glob("rank*.json"))
    return {
        int(draw): loss for file in files for draw, loss in json.loads(file.read_text())["losses"].items()
    }


@each(*WHOLE)
def test_the_loss_curve_is_that_of_one_process(runs, name):
    one, two = losses_of(runs / truth_of(name)), losses_of(runs / name)
    assert sorted(one) == list(range(2 * STEPS))
    assert two == pytest.approx(one, abs=1e-5)
    assert len(set(two.values())) == 2 * STEPS, "ranks see other text"


@each(*WHOLE, *ON)
def test_every_rank_validates_after_the_same_steps(runs, name):
    ranks = [json.loads((runs / name / f"rank{rank}.json").read_text())["validated"] for rank in (0, 1)]
    assert ranks == 2 * [[step for step in (2, 4, 6) if step > begun_at(name)]]


@each(*WHOLE, *ON)
def test_the_mask_is_that_of_one_process_but_for_ties(runs, name):
    one = runs / truth_of(name)
    before, after = (MaskSet.load(folder / "mask.safetensors") for folder in (one, runs / name))
    moved = saved(runs / name)
    for layer, value in saved(one).items():
        torch.testing.assert_close(moved[layer], value, rtol=0, atol=2e-4)
    differing = sum(
        int((mask.to_bool() != after.layers[tensor].to_bool()).sum()) // 2
        for tensor, mask in before.layers.items()
    )
    assert differing <= 4
    assert verify_export(runs / name / "export").ok


@each(*(name for name in WHOLE if name in REPORTED))
def test_the_report_is_that_of_one_process(runs, name):
    one, two = (json.loads((runs / folder / "report.json").read_text()) for folder in (truth_of(name), name))
    names = ("settings", "before", "layers", "steps", "tokens")
    assert {fact: two[fact] for fact in names} == {fact: one[fact] for fact in names}
    for first, second in zip(one["continuations"], two["continuations"], strict=True):
        assert second.keys() == first.keys()
        assert second["dense"] == first["dense"]
    before = [MaskSet.load(runs / folder / "before.safetensors") for folder in (truth_of(name), name)]
    assert before[0].overlap(before[1]).all > 0.999
    assert (runs / name / "report.html").exists()


def test_ranks_that_measure_differently_start_from_the_first_ones_prior(runs):
    ranks = [torch.load(runs / name / f"rank{i}.pt", weights_only=True) for name in MEASURED for i in (0, 1)]
    first = ranks[0]["priors"]
    assert {f"{layer}.logits" for layer in first} == ranks[0]["logits"].keys()
    for rank in ranks:
        assert all(torch.equal(mask, first[name]) for name, mask in rank["priors"].items())
    for one, other in (ranks[:2], ranks[2:]):
        assert all(torch.equal(one["logits"][name], x) for name, x in other["logits"].items())
    asked = [
        json.loads((runs / name / f"rank{i}.json").read_text())["measured"]
        for name in MEASURED
        for i in (0, 1)
    ]
    assert asked == [1, 0, 1, 1], "with whole models one rank measures, a sharded one all run together"


@pytest.mark.parametrize("strategy", ["ddp", "sharded"])
def test_a_loss_that_breaks_on_one_rank_ends_all_with_the_same_words(runs, strategy):
    said = [(runs / f"{strategy}-broken" / f"rank{rank}.txt").read_text() for rank in (0, 1)]
    assert said[0] == said[1]
    assert said[0].startswith("the loss is not finite at optimizer step 2; ")


def test_every_rank_holds_half_of_everything(runs):
    ranks = [json.loads((runs / "sharded-step" / f"rank{rank}.json").read_text())["held"] for rank in (0, 1)]
    assert ranks[0].keys() == ranks[1].keys()
    assert sum(name.startswith("learned.") for name in ranks[0]) == 14
    for name, (placement, shape, _) in ranks[0].items():
        rows = [held[name][2][0] for held in ranks]
        assert placement == "(Shard(dim=0),)"
        assert sum(rows) == shape[0]
        assert abs(rows[0] - rows[1]) <= 1


@each("ddp-llama", "sharded-step", "one-llama")
def test_checkpoints_hold_only_what_is_learned(runs, name):
    checkpoint = read_checkpoint(runs / name / "checkpoints" / f"step={SAVED}.ckpt")
    logits = saved(runs / name)
    assert checkpoint["state_dict"].keys() == {f"lm.{parameter}" for parameter in logits}
    large = [
        t
        for o in checkpoint["optimizer_states"]
        for s in o["state"].values()
        for t in s.values()
        if t.numel() > 1
    ]
    assert sum(t.numel() for t in large) == 2 * sum(t.numel() for t in logits.values())
    assert checkpoint["global_step"] == SAVED


def test_a_folder_that_lacks_a_shard_is_damaged(runs, tmp_path):
    whole = runs / "sharded-step" / "checkpoints" / f"step={SAVED}.ckpt"
    check_checkpoint(str(whole))
    for name in sorted(path.name for path in whole.glob("*.safetensors")):
        folder = shutil.copytree(whole, tmp_path / name)
        (folder / name).unlink()
        with pytest.raises(UserError, match="is damaged; resume from another one"):
            check_checkpoint(str(folder))


@each(*WHOLE)
def test_one_process_resumes_where_two_were(runs, name, tmp_path):
    path, kind = runs / name / "checkpoints" / f"step={SAVED}.ckpt", name.partition("-")[2]
    model, learner = model_of(runs, kind), KINDS[kind]
    module, recorder, _ = learn(model, tmp_path, runs / "shared", str(path), learner)
    assert sorted(recorder.losses) == list(range(2 * SAVED, 2 * STEPS))
    assert recorder.validated == [4, 6]
    expected = saved(runs / f"one-{kind}")
    for layer, value in learned_of(module).items():
        torch.testing.assert_close(value, expected[layer], rtol=0, atol=2e-4)


def test_two_ranks_resume_from_their_shards_to_the_same_bits(runs):
    before, after = saved(runs / "sharded-step"), saved(runs / "sharded-shards")
    assert all(torch.equal(value, after[layer]) for layer, value in before.items())
    assert sorted(losses_of(runs / "sharded-shards")) == list(range(2 * SAVED, 2 * STEPS))


@pytest.mark.slow
def test_ranks_may_be_more_than_rows_and_others_than_wrote_the_shards(runs):
    llama, shards = runs / "llama", runs / "sharded-step" / "checkpoints" / f"step={SAVED}.ckpt"
    # Of 1:2 there are two candidate masks to share out, so the third rank has no logits.
    starts = {"1:2": None, "step": shards}
    specs = [
        {"folder": runs / f"three-{learner}", "strategy": "sharded", "model": llama, "learner": learner}
        | {"ckpt_path": path, "windows": 6}
        for learner, path in starts.items()
    ]
    spread(runs, {"specs": specs}, ranks=3)
    for learner, path in starts.items():
        module, _, _ = learn(llama, runs / f"alone-{learner}", runs / "shared", path, learner, windows=6)
        three = saved(runs / f"three-{learner}")
        for layer, value in learned_of(module).items():
            torch.testing.assert_close(three[layer], value, rtol=0, atol=5e-4)


def test_sharded_runs_save_the_step_on_ctrl_c_and_resume_to_the_same_bits(runs):
    told = runs / "told"
    assert json.loads((told / "ended0.json").read_text()) == [130, f"step={TOLD}.ckpt"]
    # It got the signal, and may look before the first has tidied up.
    assert json.loads((told / "ended1.json").read_text())[0] == 130
    assert list(json.loads((told / "losses.json").read_text())) == [str(2 * i) for i in range(TOLD, STEPS)]
    before, after = saved(runs / "sharded-maskllm"), saved(told)
    assert all(torch.equal(value, after[layer]) for layer, value in before.items())
    assert [path.name for path in (told / "checkpoints").iterdir()] == [f"step={STEPS}.ckpt"]


@each("sharded-maskllm", "sharded-proxsparse")
def test_callbacks_see_of_a_sharded_model_what_they_see_of_an_unsharded_one(runs, name):
    kind = name.removeprefix("sharded-")
    one, two = (
        json.loads((runs / name / "summary.json").read_text()) for name in (f"one-{kind}", f"sharded-{kind}")
    )
    assert two["perplexity"] == pytest.approx(one["perplexity"], rel=1e-4)
    assert two["zeros"] == one["zeros"]
    one, two = (metrics(runs / name) for name in (f"one-{kind}", f"sharded-{kind}"))
    assert {"mask/flips", "mask/entropy" if kind == "maskllm" else "prox/zeros_2"} <= {tag for tag, _ in one}
    assert two == pytest.approx(one, rel=1e-3, abs=1e-5)


def metrics(folder):
    """What was logged, by tag and step, except speed, memory and losses, which are logged per micro-batch."""
    with (folder / "log/metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    found = {(tag, row["step"]): value for row in rows for tag, value in row.items() if value}
    left_out = "tokens/per_second", "memory/peak_gib", "train/"
    return {key: float(value) for key, value in found.items() if not key[0].startswith(left_out)}


def test_ranks_that_see_different_disks_write_no_checkpoint(runs):
    said = [(runs / "apart" / f"rank{rank}.txt").read_text() for rank in (0, 1)]
    assert said[0] == said[1]
    assert "a.ckpt" in said[0]
    assert [list((runs / "apart" / rank).iterdir()) for rank in "01"] == [[], []]


REFUSED = {
    "wanda": (["--model.prior", "wanda"], "prune .* --method wanda"),
    "sparsegpt": (["--model.prior", "sparsegpt"], "prune .* --method sparsegpt"),
    "8 bits": (["--config", "overlays/adamw8bit.yaml"], "AdamW8bit .* overlays/adamw8bit.yaml"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_can_t_be_sharded_is_refused_before_a_process_is_started(name, lab, capsys):
    if name == "8 bits":
        pytest.importorskip("torchao", reason="torchao is not installed")
    options, says = REFUSED[name]
    sharded = ["--config", "overlays/fsdp2.yaml", "--trainer.devices", "2"]
    assert run("fit", *lab.quick(*sharded, *options)) == 1
    assert re.search(says, capsys.readouterr().err)
    assert list(lab.folder.iterdir()) == []


def test_one_process_measures_and_exports_the_shards_of_two(runs, lab, capsys):
    typed = runs / "typed"
    one = str(runs / "one-llama" / "checkpoints" / f"step={STEPS}.ckpt")
    there = ["--ckpt_path", str(typed / "checkpoints" / "step=4.ckpt")]
    # Made in a folder of its own from the same text, and with a directory as its prior.
    assert (
        run("export", *lab.quick(*there, "--out", "out", "--allow_changed_settings", model=runs / "llama"))
        == 0
    )
    assert verify_export(lab.folder / "out").ok
    masks = [MaskSet.load(path).layers for path in (typed / "mask.safetensors", lab.folder / "out")]
    assert all(torch.equal(mask.packed, masks[1][name].packed) for name, mask in masks[0].items())
    capsys.readouterr()
    assert run("validate", *lab.quick(*there, model=runs / "llama")) == 0
    alone = perplexity(capsys.readouterr().out)
    # 16 windows are asked for and 5 held out: one of the two ranks sees a window twice.
    assert perplexity((typed / "validate0.txt").read_text()) == pytest.approx(alone, rel=0.05)
    found = json.loads((typed / "summary.json").read_text())["perplexity"]
    assert alone == pytest.approx(found["roi"], rel=1e-3)
    # It started from the mask of another run's export, as that run measures it.
    assert run("validate", *lab.quick("--ckpt_path", one, model=runs / "llama")) == 0
    assert found["prior"] == pytest.approx(perplexity(capsys.readouterr().out), rel=1e-3)


def perplexity(said):
    (line,) = (line for line in plain_text(said).splitlines() if "val/perplexity" in line)
    return float(line.split("val/perplexity")[1].split()[0])
