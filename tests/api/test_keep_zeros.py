"""Zeros that stay through other people's loops: against masks multiplied by hand, in plain PyTorch."""

import copy
import warnings

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from safetensors.torch import load_file
from torch import nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import weight_norm
from transformers import AutoModelForCausalLM

from helpers.directories import export_of
from helpers.lab import make_lab, run
from helpers.tiny_models import tiny_gpt2, tiny_mixtral, tiny_qwen2
from roi_lightning.api import keep_zeros
from roi_lightning.errors import UserError
from roi_lightning.masks.mask_set import MaskSet

lab = pytest.fixture(make_lab)
STEADY = {"attn_pdrop": 0, "resid_pdrop": 0, "embd_pdrop": 0}


def pruned(lab, builder=tiny_qwen2):
    """A base model, and an export of it under a random mask."""
    options = STEADY if builder is tiny_gpt2 else {}
    source, _, export = export_of(builder(lab.folder / "base", dtype=torch.float32, **options))
    return source.path, export


def load(directory, dtype="auto"):
    return AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)


def kept(lm, export, of=lambda weight: weight):
    """Every masked weight, or what is asked of it, with its boolean mask, found by the end of its name."""
    named = {name: of(weight) for name, weight in lm.named_parameters()}
    for name, weight in list(named.items()):
        if ".experts." in name:  # Mixtral's: another name on disk for each
            inner = lm.config.intermediate_size
            parts = (
                [("w1", slice(inner)), ("w3", slice(inner, None))]
                if "gate" in name
                else [("w2", slice(None))]
            )
            stem = name.rpartition(".")[0].replace(".mlp.", ".block_sparse_moe.")
            named |= {f"{stem}.{i}.{w}.weight": x[rows] for i, x in enumerate(weight) for w, rows in parts}
    for stored, layer in MaskSet.load(export).layers.items():
        (name,) = [name for name in named if name.endswith(stored)]
        yield stored, named[name], layer.to_bool()


def assert_zeros(lm, export):
    for name, weight, mask in kept(lm, export):
        bits = (
            weight.detach().contiguous().view(torch.int32 if weight.dtype == torch.float32 else torch.int16)
        )
        assert not bits[~mask].any(), f"every bit is zero in {name}"


def batches(count=4):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 256, (2, 12), generator=generator) for _ in range(count)]


def loss_of(lm, ids):
    return lm(input_ids=ids, labels=ids).loss


def train(lm, optimizer, steps=4, parts=1, after_backward=lambda: None):
    """A loop of somebody else's; the norms it clips by."""
    norms = []
    for step in range(steps):
        for ids in batches(steps * parts)[step * parts : (step + 1) * parts]:
            (loss_of(lm, ids) / parts).backward()
        after_backward()
        norms.append(torch.nn.utils.clip_grad_norm_(lm.parameters(), 0.5))
        optimizer.step()
        optimizer.zero_grad()
    return norms


def adamw(lm, **options):
    weights = [x for x in lm.parameters() if x.requires_grad]
    return torch.optim.AdamW(weights, **{"lr": 1e-2, "weight_decay": 0.1} | options)


@pytest.mark.parametrize(("builder", "parts"), [(tiny_qwen2, 1), (tiny_gpt2, 3), (tiny_mixtral, 3)])
def test_a_bare_loop_trains_as_with_masks_by_hand(lab, builder, parts):
    base, export = pruned(lab, builder)
    mine, theirs = load(export), load(export)
    with keep_zeros(mine) as zeros:
        norms = train(mine, adamw(mine), parts=parts)

    def mask_gradients():
        for _, gradient, mask in kept(theirs, export, lambda weight: weight.grad):
            gradient *= mask

    torch.testing.assert_close(norms, train(theirs, adamw(theirs), 4, parts, mask_gradients))
    for one, other in zip(mine.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, other)
    assert_zeros(mine, export)
    before = dict(load(export).named_parameters())
    assert all(not torch.equal(x, before[name]) for name, x in mine.named_parameters())
    zeros.save(lab.folder / "trained")
    assert run("verify", lab.folder / "trained") == 0
    assert run("verify", lab.folder / "trained", "--base", base) == 0
    with torch.no_grad():
        ids = batches(1)[0]
        assert torch.equal(loss_of(mine.eval(), ids), loss_of(load(lab.folder / "trained"), ids))


def test_a_kept_weight_that_is_zero_is_trained(lab):
    _, export = pruned(lab)
    lm = load(export)
    _, weight, mask = next(iter(kept(lm, export)))
    with torch.no_grad():
        weight[mask] = 0
    with keep_zeros(lm):
        train(lm, adamw(lm), 2)
    assert weight[mask].count_nonzero() > mask.sum() // 2
    assert_zeros(lm, export)


class Noisy(torch.optim.SGD):
    """Moves every weight, whatever its gradient."""

    def step(self, closure=None):
        super().step(closure)
        with torch.no_grad():
            for group in self.param_groups:
                for weight in group["params"]:
                    weight += torch.randn_like(weight) * 0.01


def test_what_moves_every_weight_moves_no_zero(lab):
    _, export = pruned(lab)
    lm = load(export)
    other = torch.nn.Linear(4, 4)
    optimizer = Noisy([*lm.parameters(), *other.parameters()], lr=1e-2, momentum=0.9, nesterov=True)
    with keep_zeros(lm):
        for ids in batches():
            loss_of(lm, ids).backward()
            optimizer.step()
            optimizer.zero_grad()
            assert_zeros(lm, export)


@pytest.fixture(autouse=True)
def _no_earlier_accelerator():
    """accelerate keeps the precision and the accumulation of a process's first `Accelerator`, a `Trainer`'s too."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def hugging_face(lab, lm):
    """Run the `Trainer` of transformers."""
    from transformers import Trainer, TrainingArguments

    rows = [{"input_ids": ids, "labels": ids} for ids in torch.cat(batches())]
    settings = {"max_steps": 3, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 2}
    settings |= {"learning_rate": 1e-2, "weight_decay": 0.1, "max_grad_norm": 0.5, "use_cpu": True}
    quiet = {"report_to": "none", "disable_tqdm": True, "logging_strategy": "no", "save_strategy": "no"}
    arguments = TrainingArguments(str(lab.folder / "trainer"), **settings | quiet)
    trainer = Trainer(lm, arguments, train_dataset=rows)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*pin_memory.*")
        trainer.train()
    return trainer


def test_hugging_face_trainer(lab):
    base, export = pruned(lab)
    lm = load(export)
    with keep_zeros(lm) as zeros:
        trainer = hugging_face(lab, lm)
    assert trainer.state.global_step == 3
    assert_zeros(lm, export)
    assert not torch.equal(lm.model.norm.weight, load(export).model.norm.weight)
    trainer.save_model(str(lab.folder / "plain"))
    again = keep_zeros(load(lab.folder / "plain"), export)
    again.remove()
    for handle, name in ((zeros, "trained"), (again, "again")):
        handle.save(lab.folder / name)
        assert run("verify", lab.folder / name, "--base", base) == 0
    one, other = (load_file(lab.folder / name / "model.safetensors") for name in ("trained", "again"))
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert run("verify", lab.folder / "plain") == 1, "what says so in docs"


def test_a_removed_handle_leaves_the_model_alone(lab):
    _, export = pruned(lab)
    mine, theirs = load(export), load(export)
    zeros = keep_zeros(mine)
    zeros.remove()
    zeros.remove()
    train(mine, adamw(mine), 2)
    train(theirs, adamw(theirs), 2)
    for one, other in zip(mine.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(one, other)
    with pytest.raises(UserError, match="not zero where its mask"):
        zeros.check()
    with pytest.raises(UserError, match="not zero where its mask"):
        zeros.save(lab.folder / "trained")
    assert not (lab.folder / "trained").exists()


# What is done to a layer; a wrapper stands for an adapter.
REPLACED = {
    "weight_norm": lambda lm, layer: weight_norm(layer),
    "parametrized": lambda lm, layer: parametrize.register_parametrization(layer, "weight", nn.Identity()),
    "wrapped": lambda lm, layer: lm.set_submodule("model.layers.0.mlp.up_proj", nn.Sequential(layer)),
    "assigned": lambda lm, layer: lm.load_state_dict(copy.deepcopy(lm.state_dict()), assign=True),
}


def changed_inside(lm, change, steps=0):
    with keep_zeros(lm):
        change(lm, lm.model.layers[0].mlp.up_proj)
        train(lm, adamw(lm), steps)


@pytest.mark.parametrize("how", REPLACED)
def test_a_weight_that_is_replaced_inside_is_refused(lab, how):
    """Its zeros would fill up unseen: at the next step, or at the end if there is none."""
    _, export = pruned(lab)
    for steps in (0, 1):
        lm = load(export)
        with pytest.raises(UserError, match=r"0\.mlp\..*\.weight' was replaced; call keep_zeros after"):
            changed_inside(lm, REPLACED[how], steps)
    if how != "assigned":
        with pytest.raises(UserError, match=r"up_proj\.weight' is not among .*; give .* without adapters"):
            keep_zeros(lm, export)


def test_a_zero_that_is_lost_after_the_last_step_is_told(lab):  # as by an adapter that is merged
    _, export = pruned(lab)
    with pytest.raises(UserError, match=r"up_proj\.weight' is not zero"):
        changed_inside(load(export), lambda lm, layer: layer.weight.data.add_(0.1))


def test_weights_that_are_trained_later_have_no_gradient_where_they_are_pruned(lab):
    _, export = pruned(lab)
    lm = load(export).requires_grad_(False)
    with keep_zeros(lm):
        loss_of(lm.requires_grad_(), batches(1)[0]).backward()
    for name, gradient, mask in kept(lm, export, lambda weight: weight.grad):
        assert not gradient[~mask].any(), name
        assert gradient[mask].any()
