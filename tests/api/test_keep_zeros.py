"""Zeros that stay through other people's loops: against masks multiplied by hand, in plain PyTorch."""

import warnings
from dataclasses import replace

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from lightning.pytorch import LightningModule, Trainer
from safetensors.torch import load_file
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM

import roi_lightning
from cli_helpers import QUICK_TRAINER, make_lab, run
from roi_lightning.api import keep_zeros
from roi_lightning.errors import UserError
from roi_lightning.export import write_export
from roi_lightning.masks.mask_set import MASK_FILE, MaskSet
from roi_lightning.models.source import resolve_model
from tiny_models import random_masks, tiny_gpt2, tiny_mixtral, tiny_qwen2

lab = pytest.fixture(make_lab)
# What peft 0.21 asks of transformers by an old name.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
TARGETS = {tiny_qwen2: ["q_proj", "down_proj"], tiny_gpt2: ["c_attn", "c_proj"]}
STEADY = {"attn_pdrop": 0, "resid_pdrop": 0, "embd_pdrop": 0}


def pruned(lab, builder=tiny_qwen2, dtype=torch.float32, **options):
    """A base model, and an export of it under a random mask."""
    options |= STEADY if builder is tiny_gpt2 else {}
    source = resolve_model(str(builder(lab.folder / "base", dtype=dtype, **options)))
    return source.path, write_export(source, random_masks(source), lab.folder / "pruned")


def load(directory, dtype="auto"):
    return AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)


def kept(lm, export):
    """Every masked weight with its boolean mask, found by the end of its name."""
    named = {name.replace(".base_layer", ""): x for name, x in lm.named_parameters()}
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


@pytest.mark.parametrize("builder", [tiny_qwen2, tiny_gpt2])
@pytest.mark.parametrize("parts", [1, 3])
def test_a_bare_loop_trains_as_with_masks_by_hand(lab, builder, parts):
    base, export = pruned(lab, builder)
    mine, theirs = load(export), load(export)
    with keep_zeros(mine) as zeros:
        norms = train(mine, adamw(mine), parts=parts)

    def mask_gradients():
        for _, weight, mask in kept(theirs, export):
            weight.grad *= mask

    torch.testing.assert_close(norms, train(theirs, adamw(theirs), 4, parts, mask_gradients))
    for one, other in zip(mine.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, other)
    assert_zeros(mine, export)
    before = dict(load(export).named_parameters())
    assert all(not torch.equal(x, before[name]) for name, x in mine.named_parameters())
    zeros.save(lab.folder / "out")
    assert run("verify", lab.folder / "out") == 0
    assert run("verify", lab.folder / "out", "--base", base) == 0
    with torch.no_grad():
        ids = batches(1)[0]
        assert torch.equal(loss_of(mine.eval(), ids), loss_of(load(lab.folder / "out"), ids))


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


def test_momentum_from_before_moves_no_zero(lab):
    _, export = pruned(lab)
    lm = load(export)
    optimizer = adamw(lm)
    loss_of(lm, batches(1)[0]).backward()
    optimizer.step()  # fills the zeros and the moments
    with torch.no_grad():
        for _, weight, mask in kept(lm, export):
            weight[~mask] = 0
    with keep_zeros(lm) as zeros:
        train(lm, optimizer, 2)
        zeros.check()
    assert_zeros(lm, export)


@pytest.mark.slow
def test_zeros_are_exact_after_a_thousand_steps(lab):
    _, export = pruned(lab)
    lm = load(export)
    optimizer = adamw(lm, lr=1e-3)
    with keep_zeros(lm):
        for _ in range(250):
            train(lm, optimizer, 4)
    assert_zeros(lm, export)


def test_bfloat16(lab):
    base, export = pruned(lab, dtype=torch.bfloat16)
    lm = load(export)
    assert lm.dtype == torch.bfloat16
    with keep_zeros(lm) as zeros:
        train(lm, adamw(lm))
    assert_zeros(lm, export)
    assert run("verify", zeros.save(lab.folder / "out"), "--base", base) == 0


def test_a_model_that_is_cast_afterwards_is_kept(lab):
    _, export = pruned(lab)
    lm = load(export)
    with keep_zeros(lm):
        lm.to(torch.bfloat16)
        loss_of(lm, batches(1)[0]).backward()
        assert all(not weight.grad[~mask].any() for _, weight, mask in kept(lm, export))
        adamw(lm).step()
    assert_zeros(lm, export)


def test_weights_in_float32_of_a_model_in_bfloat16_are_written_as_the_base_stores_them(lab):
    base, export = pruned(lab, dtype=torch.bfloat16)
    lm = load(export, torch.float32)
    with keep_zeros(lm) as zeros:
        train(lm, adamw(lm))
    assert run("verify", zeros.save(lab.folder / "out"), "--base", base) == 0
    written = load_file(lab.folder / "out" / "model.safetensors")
    assert all(torch.equal(written[name], x.bfloat16()) for name, x in lm.named_parameters())


@pytest.mark.slow
def test_adamw_in_8_bits(lab):
    with warnings.catch_warnings():
        # The compiler that torchao's step goes through meets torch's own deprecated parts when it is first imported.
        warnings.simplefilter("ignore")
        import torch._inductor.compile_fx

        optim = pytest.importorskip("torchao.optim", reason="torchao is not installed")
    _, export = pruned(lab, num_key_value_heads=4, dtype=torch.bfloat16)
    lm = load(export)
    optimizer = optim.AdamW8bit(lm.parameters(), lr=1e-2, weight_decay=0.1, bf16_stochastic_round=True)
    with keep_zeros(lm):
        train(lm, optimizer, 3)
    assert_zeros(lm, export)
    assert not torch.equal(
        lm.model.layers[0].mlp.up_proj.weight, load(export).model.layers[0].mlp.up_proj.weight
    )


def test_a_resumed_loop_ends_alike(lab):
    _, export = pruned(lab)
    whole, first = load(export), load(export)
    one, other = adamw(whole), adamw(first)
    with keep_zeros(whole), keep_zeros(first):
        for ids in batches(4):
            loss_of(whole, ids).backward()
            one.step()
            one.zero_grad()
        for ids in batches(4)[:2]:
            loss_of(first, ids).backward()
            other.step()
            other.zero_grad()
    first.save_pretrained(lab.folder / "saved")
    second = load(lab.folder / "saved")
    again = adamw(second)
    again.load_state_dict(other.state_dict())
    with keep_zeros(second, export):
        for ids in batches(4)[2:]:
            loss_of(second, ids).backward()
            again.step()
            again.zero_grad()
    for mine, theirs in zip(second.parameters(), whole.parameters(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.fixture(autouse=True)
def _no_earlier_accelerator():
    """accelerate keeps the precision and the accumulation of a process's first `Accelerator`, a `Trainer`'s too."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def hugging_face(lab, lm, **options):
    """Run the `Trainer` of transformers."""
    from transformers import Trainer, TrainingArguments

    rows = [{"input_ids": ids, "labels": ids} for ids in torch.cat(batches())]
    settings = {"max_steps": 3, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 2}
    settings |= {"learning_rate": 1e-2, "weight_decay": 0.1, "max_grad_norm": 0.5, "use_cpu": True}
    quiet = {"report_to": "none", "disable_tqdm": True, "logging_strategy": "no", "save_strategy": "no"}
    arguments = TrainingArguments(str(lab.folder / "trainer"), **settings | quiet | options)
    trainer = Trainer(lm, arguments, train_dataset=rows)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*pin_memory.*")
        trainer.train()
    return trainer


@pytest.mark.parametrize("bf16", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_hugging_face_trainer(lab, bf16):
    base, export = pruned(lab)
    lm = load(export)
    with keep_zeros(lm) as zeros:
        trainer = hugging_face(lab, lm, bf16=bf16)
    assert trainer.state.global_step == 3
    assert_zeros(lm, export)
    assert not torch.equal(lm.model.norm.weight, load(export).model.norm.weight)
    trainer.save_model(str(lab.folder / "plain"))
    again = keep_zeros(load(lab.folder / "plain"), export)
    again.remove()
    for handle, name in ((zeros, "out"), (again, "again")):
        handle.save(lab.folder / name)
        assert run("verify", lab.folder / name, "--base", base) == 0
    one, other = (load_file(lab.folder / name / "model.safetensors") for name in ("out", "again"))
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert run("verify", lab.folder / "plain") == 1, "what says so in docs"


def test_accelerate(lab):
    _, export = pruned(lab)
    lm, plain = load(export), load(export)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    with keep_zeros(lm), keep_zeros(plain):
        wrapped, optimizer = accelerator.prepare(lm, adamw(lm))
        for ids in batches(4):
            with accelerator.accumulate(wrapped):
                accelerator.backward(loss_of(wrapped, ids))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(wrapped.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
        train(plain, adamw(plain), 2, 2)
    assert_zeros(lm, export)
    for mine, theirs in zip(lm.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)


def train_on_a_rank(rank, export, folder):
    """One of two ranks, with every second batch."""
    torch.set_num_threads(1)
    rendezvous = f"file://{folder / 'rendezvous'}"
    torch.distributed.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=2)
    lm = load(export)
    wrapped, optimizer = DistributedDataParallel(lm), adamw(lm)
    with keep_zeros(lm) as zeros:
        for ids in batches(6)[rank::2]:
            loss_of(wrapped, ids).backward()
            torch.nn.utils.clip_grad_norm_(lm.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    if rank == 0:
        zeros.save(folder / "out")
    torch.distributed.destroy_process_group()


@pytest.mark.slow  # two processes that import everything
def test_two_ranks_train_as_one_process(lab):
    base, export = pruned(lab)
    torch.multiprocessing.spawn(train_on_a_rank, (export, lab.folder), nprocs=2)
    plain, both = load(export), load(lab.folder / "out")
    with keep_zeros(plain):
        train(plain, adamw(plain), 3, 2)
    assert_zeros(both, export)
    for mine, theirs in zip(plain.parameters(), both.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)
    assert run("verify", lab.folder / "out", "--base", base) == 0


class Plain(LightningModule):
    def __init__(self, lm):
        super().__init__()
        self.lm = lm

    def training_step(self, ids):
        return loss_of(self.lm, ids)

    def configure_optimizers(self):
        return adamw(self.lm)


def test_lightning(lab):
    _, export = pruned(lab)
    lm = load(export)
    settings = {"max_steps": 2, "accumulate_grad_batches": 2, "gradient_clip_val": 0.5}
    with keep_zeros(lm), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*does not have many workers|.*in eval mode")
        trainer = Trainer(**QUICK_TRAINER | settings, default_root_dir=lab.folder)
        trainer.fit(Plain(lm), torch.utils.data.DataLoader(batches(4), batch_size=None))
    assert_zeros(lm, export)


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
    with pytest.raises(UserError, match="prunes and that are not zero"):
        zeros.check()
    with pytest.raises(UserError, match="prunes and that are not zero"):
        zeros.save(lab.folder / "out")
    assert not (lab.folder / "out").exists()


def test_an_error_in_the_loop_removes_it(lab):
    _, export = pruned(lab)
    lm = load(export)
    with pytest.raises(ZeroDivisionError), keep_zeros(lm) as zeros:
        _ = 1 / 0
    train(lm, adamw(lm), 1)
    with pytest.raises(UserError):
        zeros.check()


def test_nothing_trained_is_written_as_it_was(lab):
    base, export = pruned(lab)
    zeros = roi_lightning.keep_zeros(load(export))
    zeros.remove()
    zeros.save(lab.folder / "out", base=str(base))
    one, other = (load_file(x / "model.safetensors") for x in (export, lab.folder / "out"))
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert MaskSet.load(lab.folder / "out").updated == {}
    with pytest.raises(UserError, match="is an earlier export"):
        zeros.save(lab.folder / "out")
    zeros.save(lab.folder / "out", overwrite=True)


# LoRA.


def lora(lm, builder, **options):
    peft = pytest.importorskip("peft")
    turned = {"fan_in_fan_out": True} if builder is tiny_gpt2 else {}
    settings = {"r": 4, "lora_alpha": 12, "target_modules": TARGETS[builder], "init_lora_weights": False}
    return peft.get_peft_model(lm, peft.LoraConfig(**settings | turned | options))


def by_hand(adapted, export):
    """The masked product added to every weight with an adapter, in the weights of a plain model."""
    masks = {stored: mask for stored, _, mask in kept(load(export), export)}
    lm = load(export)
    plain = dict(lm.named_parameters())
    for name, module in adapted.get_base_model().named_modules():
        if hasattr(module, "lora_A"):
            product = 3 * module.lora_B["default"].weight @ module.lora_A["default"].weight
            mask = masks[f"{name}.weight"]
            delta = (product.T if module.fan_in_fan_out else product) * mask
            plain[f"{name}.weight"].data += delta.detach()
    return lm


@pytest.mark.parametrize("safe_merge", [False, True])
@pytest.mark.parametrize("builder", [tiny_qwen2, tiny_gpt2])
def test_lora_computes_and_merges_the_masked_product(lab, builder, safe_merge):
    base, export = pruned(lab, builder)
    adapted = lora(load(export), builder)
    frozen = {name: x.clone() for name, x in adapted.named_parameters() if not x.requires_grad}
    ids = batches(1)[0]
    with keep_zeros(adapted) as zeros:
        train(adapted, adamw(adapted), 2)
        assert all(torch.equal(x, frozen[name]) for name, x in adapted.named_parameters() if name in frozen)
        wanted = by_hand(adapted, export)
        with torch.no_grad():
            torch.testing.assert_close(
                adapted.eval()(ids).logits, wanted.eval()(ids).logits, rtol=0, atol=1e-5
            )
        with pytest.raises(UserError, match="call merge_and_unload first"):
            zeros.save(lab.folder / "out")
        merged = adapted.merge_and_unload(safe_merge=safe_merge)
    assert_zeros(merged, export)
    for one, other in zip(merged.parameters(), wanted.parameters(), strict=True):
        torch.testing.assert_close(one, other)
    zeros.save(lab.folder / "out")
    assert run("verify", lab.folder / "out", "--base", base) == 0
    with torch.no_grad():
        torch.testing.assert_close(load(lab.folder / "out")(ids).logits, merged(ids).logits)


def test_the_gradients_of_lora_are_those_of_the_masked_product(lab):
    _, export = pruned(lab)
    adapted = lora(load(export), tiny_qwen2)
    module = adapted.get_base_model().model.layers[0].self_attn.q_proj
    masks = {name: mask for name, _, mask in kept(load(export), export)}
    mask = masks["model.layers.0.self_attn.q_proj.weight"]
    x, upstream = torch.randn(5, 64), torch.randn(5, 64)
    with keep_zeros(adapted):
        (module(x) * upstream).sum().backward()
    a, b = (part["default"].weight for part in (module.lora_A, module.lora_B))
    by_weight = upstream.T @ x * mask * 3  # of B A
    torch.testing.assert_close(b.grad, by_weight @ a.detach().T)
    torch.testing.assert_close(a.grad, b.detach().T @ by_weight)


def test_merged_adapters_can_be_taken_out_again_and_turned_off(lab):
    _, export = pruned(lab)
    adapted = lora(load(export), tiny_qwen2).eval()
    ids = batches(1)[0]
    with keep_zeros(adapted) as zeros, torch.no_grad():
        logits = adapted(ids).logits
        adapted.merge_adapter()
        zeros.check()
        torch.testing.assert_close(adapted(ids).logits, logits)
        adapted.unmerge_adapter()
        zeros.check()
        torch.testing.assert_close(adapted(ids).logits, logits)
        with adapted.disable_adapter():
            torch.testing.assert_close(adapted(ids).logits, load(export)(ids).logits)


def test_lora_with_dropout_and_biases_in_bfloat16_under_the_trainer(lab):
    base, export = pruned(lab, dtype=torch.bfloat16)
    adapted = lora(load(export), tiny_qwen2, lora_dropout=0.1, lora_bias=True, target_modules=["q_proj"])
    with keep_zeros(adapted) as zeros:
        hugging_face(lab, adapted, bf16=True)
        merged = adapted.merge_and_unload()
    assert_zeros(merged, export)
    assert not torch.equal(
        merged.model.layers[0].self_attn.q_proj.bias, load(export).model.layers[0].self_attn.q_proj.bias
    )
    assert run("verify", zeros.save(lab.folder / "out"), "--base", base) == 0


def test_weights_that_peft_copies_to_train_them_keep_their_zeros(lab):
    _, export = pruned(lab)
    adapted = lora(load(export), tiny_qwen2, target_modules=["q_proj"], modules_to_save=["up_proj"])
    with keep_zeros(adapted) as zeros:
        train(adapted, adamw(adapted), 2)
        merged = adapted.merge_and_unload()
    zeros.check()
    assert_zeros(merged, export)
    assert not torch.equal(
        merged.model.layers[0].mlp.up_proj.weight, load(export).model.layers[0].mlp.up_proj.weight
    )


def test_without_the_handle_lora_is_peft_s_own(lab):
    _, export = pruned(lab)
    one, other = lora(load(export), tiny_qwen2).eval(), lora(load(export), tiny_qwen2).eval()
    other.load_state_dict(one.state_dict())
    zeros = keep_zeros(one)
    zeros.remove()
    with torch.no_grad():
        assert torch.equal(one(batches(1)[0]).logits, other(batches(1)[0]).logits)
    one.merge_and_unload()
    with pytest.raises(UserError, match="merge adapters before the handle is removed"):
        zeros.check()


@pytest.mark.filterwarnings("ignore")  # of TRL's own habits
@pytest.mark.slow
def test_supervised_fine_tuning_with_trl(lab):
    trl = pytest.importorskip("trl")
    datasets, peft = pytest.importorskip("datasets"), pytest.importorskip("peft")
    base, export = pruned(lab)
    settings = {"max_steps": 2, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    quiet = {"report_to": "none", "disable_tqdm": True, "save_strategy": "no", "use_cpu": True, "bf16": False}
    arguments = trl.SFTConfig(str(lab.folder / "trl"), max_length=32, learning_rate=1e-2, **settings | quiet)
    rows = datasets.Dataset.from_dict({"text": ["the cat sat on a mat", "two dogs run far from home"] * 4})
    trainer = trl.SFTTrainer(
        load(export),
        arguments,
        train_dataset=rows,
        peft_config=peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj"]),
    )
    with keep_zeros(trainer.model) as zeros, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*pin_memory.*")
        trainer.train()
        merged = trainer.model.merge_and_unload()
    assert_zeros(merged, export)
    assert not torch.equal(
        merged.model.layers[0].mlp.up_proj.weight, load(export).model.layers[0].mlp.up_proj.weight
    )
    assert run("verify", zeros.save(lab.folder / "out"), "--base", base) == 0


# Refusals.


@pytest.mark.parametrize(
    ("adapter", "says"),
    [
        ({"use_dora": True}, "variant 'DoraLinearVariant'.*leave use_dora"),
        ({"init_lora_weights": "pissa"}, "not zero.*PiSSA"),
    ],
)
def test_kinds_of_lora_that_are_refused(lab, adapter, says):
    _, export = pruned(lab)
    adapted = lora(load(export), tiny_qwen2, **adapter)
    with pytest.raises(UserError, match=says):
        keep_zeros(adapted)
    assert all(
        type(x).__name__ != "MaskedLora"
        for m in adapted.modules()
        for x in getattr(m, "lora_variant", {}).values()
    )


def test_a_second_handle_on_the_same_adapters_is_refused(lab):
    _, export = pruned(lab)
    adapted = lora(load(export), tiny_qwen2)
    with keep_zeros(adapted):
        with pytest.raises(UserError, match="remove the earlier handle"):
            keep_zeros(adapted)
        module = adapted.get_base_model().model.layers[0].self_attn.q_proj
        assert module.lora_variant
    with keep_zeros(adapted):
        assert module.lora_variant


def test_adapters_that_are_no_lora_are_refused(lab):
    peft = pytest.importorskip("peft")
    _, export = pruned(lab)
    config = peft.IA3Config(target_modules=["q_proj", "down_proj"], feedforward_modules=["down_proj"])
    with pytest.raises(UserError, match=r"adapter of type .*use LoraConfig"):
        keep_zeros(peft.get_peft_model(load(export), config))


def test_models_that_are_refused(lab, tmp_path):
    base, export = pruned(lab)
    lm = load(export)
    with pytest.raises(UserError, match="prunes and that are not zero; apply the masks first"):
        keep_zeros(load(base), export)
    with pytest.raises(UserError, match=r"no mask file.*give keep_zeros the masks"):
        keep_zeros(load(base))
    with pytest.raises(UserError, match=r"given a Linear; give the transformers or peft model"):
        keep_zeros(torch.nn.Linear(4, 4))
    with pytest.raises(UserError, match="has no"):
        keep_zeros(lm, base)
    wider = load(tiny_qwen2(tmp_path / "wider", intermediate_size=256))
    with pytest.raises(
        UserError, match=r"masks of another model: .* is \[64, 256\] here and \[64, 128\] there"
    ):
        keep_zeros(wider, export)
    with pytest.raises(UserError, match="masks of another model"):
        keep_zeros(load(tiny_gpt2(tmp_path / "gpt2")), export)


def test_experts_in_a_stack_are_refused(lab):
    _, export = pruned(lab, tiny_mixtral)
    with pytest.raises(UserError, match=r"experts in a stack.*recover\.yaml"):
        keep_zeros(load(export))


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_sharded_weights_are_refused(lab):
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    _, export = pruned(lab)
    lm = load(export)
    dist.init_process_group("gloo", init_method=f"file://{lab.folder / 'store'}", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        with keep_zeros(lm):
            fully_shard(lm, mesh=mesh)
            optimizer = adamw(lm)
            loss_of(lm, batches(1)[0]).backward()
            with pytest.raises(UserError, match=r"is sharded.*recover\.yaml"):
                optimizer.step()
        with pytest.raises(UserError, match="is sharded"):
            keep_zeros(lm)
    finally:
        dist.destroy_process_group()


def test_what_can_not_be_saved_is_refused(lab):
    base, export = pruned(lab)
    lm = load(export)
    zeros = keep_zeros(lm)
    zeros.remove()
    base.rename(lab.folder / "moved")
    for spec in (str(base), "model-of-nobody"):
        masks = replace(zeros.masks, base=replace(zeros.masks.base, spec=spec))
        lost = keep_zeros(lm, masks)
        lost.remove()
        with pytest.raises(UserError, match=f"dense model '{spec}'.*give its directory as base"):
            lost.save(lab.folder / "out")
    zeros.save(lab.folder / "out", base=str(lab.folder / "moved"))
    assert run("verify", lab.folder / "out", "--base", lab.folder / "moved") == 0
    lm.resize_token_embeddings(300)
    with pytest.raises(UserError, match=r"is \[300, 64\] here and \[264, 64\] in the dense model"):
        zeros.save(lab.folder / "again", base=str(lab.folder / "moved"))
    assert (export / MASK_FILE).is_file()
    assert not (lab.folder / "again").exists()
