"""Two processes learn what one does with the same text and draws, and either goes on from the other's checkpoint."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from cli_helpers import GOING_ON, Lab
from distributed_worker import BROKEN, SAVED, STEPS, learn
from roi_lightning.checkpoint_files import read_checkpoint
from roi_lightning.export import verify_export
from roi_lightning.masks import MaskSet
from tiny_models import tiny_gpt2, tiny_llama, tiny_mixtral

TESTS = Path(__file__).parent
MEASURED = ["ddp-measured", "sharded-measured"]
WHOLE = ["ddp-llama", "sharded-llama", "gathered-llama", "sharded-gpt2", "ddp-mixtral", "sharded-mixtral"]
pytestmark = [
    *GOING_ON,
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:The dirpath has changed"),
    pytest.mark.filterwarnings("ignore:the first draws keep"),
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Folders of runs by name: `one` in this process, the others on two ranks."""
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("distributed")
    shared = root / "shared"
    Lab(root, shared)
    makers = {"llama": tiny_llama, "gpt2": tiny_gpt2, "mixtral": tiny_mixtral}
    models = {name: maker(root / name) for name, maker in makers.items()}
    for name, model in models.items():
        learner, recorder, _ = learn(model, root / f"one-{name}", shared)
        logits = {n: x.logits.detach() for n, x in learner.layers.items()}
        torch.save({"logits": logits}, root / f"one-{name}" / "rank0.pt")
        (root / f"one-{name}" / "rank0.json").write_text(json.dumps({"losses": recorder.losses, "held": {}}))
    ended = str(root / "one-llama" / "checkpoints" / f"step={SAVED}.ckpt")
    asked = [
        ("ddp-llama", "ddp", None),
        ("sharded-llama", "sharded", None),
        ("gathered-llama", "gathered", None),
    ]
    asked += [
        ("sharded-gpt2", "sharded", None),
        ("ddp-mixtral", "ddp", None),
        ("sharded-mixtral", "sharded", None),
    ]
    asked += [("ddp-on", "ddp", ended), ("sharded-on", "sharded", ended)]
    measured = {"prior": "activation", "strength": 0.5}
    specs = [
        {
            "folder": str(root / name),
            "strategy": strategy,
            "model": str(models[name.removeprefix(f"{strategy}-").replace("on", "llama")]),
            "shared": str(shared),
            "ckpt_path": path,
        }
        for name, strategy, path in asked
    ]
    specs += [specs[i] | {"folder": str(root / name), "options": measured} for i, name in enumerate(MEASURED)]
    spread(root, specs)
    return root


def spread(root, specs):
    (root / "specs.json").write_text(json.dumps(specs))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--standalone"]
    command += [str(TESTS / "distributed_worker.py"), str(root / "specs.json")]
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path]),
    }
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]


def logits_of(folder):
    return torch.load(folder / "rank0.pt", weights_only=True)["logits"]


def losses_of(folder):
    files = sorted(folder.glob("rank*.json"))
    return {
        int(draw): loss for file in files for draw, loss in json.loads(file.read_text())["losses"].items()
    }


@pytest.mark.parametrize("name", WHOLE)
def test_the_loss_curve_is_that_of_one_process(runs, name):
    one, two = losses_of(runs / f"one-{name.partition('-')[2]}"), losses_of(runs / name)
    assert sorted(one) == list(range(2 * STEPS))
    assert two == pytest.approx(one, abs=1e-5)
    assert len(set(two.values())) == 2 * STEPS, "ranks see other text and draw other masks"


@pytest.mark.parametrize("name", [*WHOLE, "ddp-on", "sharded-on"])
def test_every_rank_validates_after_the_same_steps(runs, name):
    ranks = [json.loads((runs / name / f"rank{rank}.json").read_text())["validated"] for rank in (0, 1)]
    assert ranks == 2 * [[4, 6] if name.endswith("-on") else [2, 4, 6]]


@pytest.mark.parametrize("name", [*WHOLE, "ddp-on", "sharded-on"])
def test_the_mask_is_that_of_one_process_but_for_ties(runs, name):
    one = runs / f"one-{name.partition('-')[2].replace('on', 'llama')}"
    before, after = (MaskSet.load(folder / "mask.safetensors") for folder in (one, runs / name))
    logits, moved = logits_of(one), logits_of(runs / name)
    for layer, value in logits.items():
        torch.testing.assert_close(moved[layer], value, rtol=0, atol=2e-4)
    differing = sum(
        int((mask.to_bool() != after.layers[tensor].to_bool()).sum()) // 2
        for tensor, mask in before.layers.items()
    )
    assert differing <= 4
    assert verify_export(runs / name / "export").ok


def test_ranks_that_measure_differently_start_from_the_first_ones_prior(runs):
    ranks = [torch.load(runs / name / f"rank{i}.pt", weights_only=True) for name in MEASURED for i in (0, 1)]
    first = ranks[0]["priors"]
    assert first.keys() == ranks[0]["logits"].keys()
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
    assert said[0].startswith(f"after the output of {BROKEN} the loss is not finite at optimizer step 2; ")


def test_every_rank_holds_half_of_everything(runs):
    ranks = [json.loads((runs / "sharded-llama" / f"rank{rank}.json").read_text())["held"] for rank in (0, 1)]
    assert ranks[0].keys() == ranks[1].keys()
    assert sum(name.endswith(".logits") for name in ranks[0]) == 14
    for name, (placement, shape, _) in ranks[0].items():
        rows = [held[name][2][0] for held in ranks]
        assert placement == "(Shard(dim=0),)"
        assert sum(rows) == shape[0]
        assert abs(rows[0] - rows[1]) <= 1


@pytest.mark.parametrize("name", ["ddp-llama", "sharded-llama", "gathered-llama", "one-llama"])
def test_checkpoints_hold_only_what_is_learned(runs, name):
    checkpoint = read_checkpoint(runs / name / "checkpoints" / f"step={SAVED}.ckpt")
    logits = logits_of(runs / name)
    assert checkpoint["state_dict"].keys() == {f"lm.{layer}.logits" for layer in logits}
    large = [
        t
        for o in checkpoint["optimizer_states"]
        for s in o["state"].values()
        for t in s.values()
        if t.numel() > 1
    ]
    assert sum(t.numel() for t in large) == 2 * sum(t.numel() for t in logits.values())
    assert checkpoint["global_step"] == SAVED


def test_shards_are_plain_safetensors_of_equal_size(runs):
    folder = runs / "sharded-llama" / "checkpoints" / f"step={SAVED}.ckpt"
    sizes = []
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as shard:
            assert all(key.startswith(("state_dict.", "optimizer_states.")) for key in shard.keys())  # noqa: SIM118
            sizes.append(sum(shard.get_tensor(key).numel() for key in shard.keys()))  # noqa: SIM118
    assert len(sizes) == 2
    assert sizes[0] == pytest.approx(sizes[1], rel=0.01)


@pytest.mark.parametrize("name", ["ddp-llama", "sharded-llama", "gathered-llama", "sharded-gpt2"])
def test_one_process_goes_on_where_two_were(runs, name, tmp_path):
    path = runs / name / "checkpoints" / f"step={SAVED}.ckpt"
    kind = name.partition("-")[2]
    learner, recorder, _ = learn(runs / kind, tmp_path, runs / "shared", str(path))
    assert sorted(recorder.losses) == list(range(2 * SAVED, 2 * STEPS))
    assert recorder.validated == [4, 6]
    expected = logits_of(runs / f"one-{kind}")
    for layer, value in learner.layers.items():
        torch.testing.assert_close(value.logits.detach(), expected[layer], rtol=0, atol=2e-4)
