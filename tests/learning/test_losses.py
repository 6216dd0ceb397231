"""The loss against transformers' own and torchmetrics'."""

import copy
from functools import partial

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from helpers.device_waits import NoWaits
from helpers.tiny_models import (
    VOCAB_SIZE,
    tiny_gemma2,
    tiny_gemma3,
    tiny_gpt2,
    tiny_llama,
    tiny_mistral,
    tiny_mixtral,
    tiny_qwen2,
)
from roi_lightning.evaluation.perplexity import token_perplexity
from roi_lightning.learning import losses
from roi_lightning.learning.losses import next_token_nll

SLICE = 50


@pytest.fixture(autouse=True)
def _small_slices(monkeypatch):
    monkeypatch.setattr(losses, "_SLICE_BYTES", 4 * VOCAB_SIZE * SLICE)


class Widest(TorchDispatchMode):
    """The most tokens that any fp32 tensor as wide as the vocabulary had."""

    tokens = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.dtype == torch.float32 and out.shape[-1:] == (VOCAB_SIZE,):
            self.tokens = max(self.tokens, out.numel() // VOCAB_SIZE)
        return out


@pytest.fixture
def lm(tmp_path):
    return AutoModelForCausalLM.from_pretrained(tiny_llama(tmp_path / "llama"))


def tokens(batch, length):
    return torch.randint(VOCAB_SIZE, (batch, length), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(("batch", "length"), [(1, 2), (3, 17), (9, 64)])
def test_the_sum_is_the_models_own_loss_times_the_count(lm, batch, length):
    ids = tokens(batch, length)
    nll, count = next_token_nll(lm, ids)
    assert count == batch * (length - 1)
    assert nll.dtype == torch.float32
    torch.testing.assert_close(nll, lm(input_ids=ids, labels=ids).loss * count)


def test_no_slice_of_fp32_is_larger_than_asked(lm):
    lm.to(torch.bfloat16)
    with Widest() as widest:
        next_token_nll(lm, tokens(9, 64))[0].backward()
    assert widest.tokens == SLICE


def test_low_precision_logits_are_summed_in_fp32(lm):
    ids = tokens(2, 32)
    lm.to(torch.bfloat16)
    logits = lm(input_ids=ids).logits[:, :-1].flatten(0, 1)
    wanted = -logits.double().log_softmax(-1).gather(1, ids[:, 1:].reshape(-1, 1)).sum()
    torch.testing.assert_close(next_token_nll(lm, ids)[0].double(), wanted, rtol=1e-5, atol=0)


def labelled(batch, length):
    """Ids and labels: of the first window one token counts, of the last one every other."""
    ids = tokens(batch, length)
    generator = torch.Generator().manual_seed(2)
    labels = ids.where(torch.rand(batch, length, generator=generator) < 0.4, -100)
    labels[0, 1:], labels[0, 5], labels[-1, ::2] = -100, ids[0, 5], ids[-1, ::2]
    return ids, labels


def each_token(lm, ids):
    """The slow way, [batch, length - 1]: every token's negative log-likelihood by itself."""
    log_p = lm(input_ids=ids).logits.double().log_softmax(-1)
    rows = [[-log_p[i, j - 1, ids[i, j]] for j in range(1, ids.shape[1])] for i in range(len(ids))]
    return torch.stack([torch.stack(row) for row in rows])


def test_tokens_that_do_not_count_are_not_in_the_sum_nor_in_the_perplexity(lm):
    ids, labels = labelled(5, 24)
    counted = [(i, j) for i in range(5) for j in range(1, 24) if labels[i, j] != -100]
    with torch.no_grad():
        each = each_token(lm, ids)
        wanted = sum(each[i, j - 1] for i, j in counted)
        nll, count = next_token_nll(lm, ids, labels)
    assert int(count) == len(counted)
    torch.testing.assert_close(nll.double(), wanted, rtol=1e-5, atol=0)
    perplexity = float((wanted / len(counted)).exp())
    assert token_perplexity(lm, ids.split(2), labels.split(2)) == pytest.approx(perplexity, rel=1e-4)
    assert token_perplexity(lm, ids.split(2), ids.split(2)) == token_perplexity(lm, ids.split(2))


@pytest.mark.parametrize("distillation", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("parts", [1, 5])
def test_the_objective_is_the_mean_of_the_windows_means_however_they_are_divided(lm, distillation, parts):
    ids, labels = labelled(5, 24)
    bias = torch.zeros(VOCAB_SIZE)
    bias[:50] = 2.0

    teacher = copy.deepcopy(lm)
    teacher.lm_head.register_forward_hook(lambda module, inputs, out: out + bias)
    total = sum(
        losses.objective(lm, teacher, some, distillation, some_labels)[0] / parts
        for some, some_labels in zip(ids.chunk(parts), labels.chunk(parts), strict=True)
    )
    logits = lm(input_ids=ids).logits.double()
    q, p = logits.log_softmax(-1), (logits.detach() + bias).log_softmax(-1)
    divergence = (p.exp() * (p - q)).sum(-1)[:, :-1]
    each = (1 - distillation) * each_token(lm, ids) + distillation * divergence
    means = [each[i][labels[i, 1:] != -100].mean() for i in range(5)]
    wanted = torch.stack(means).mean()
    torch.testing.assert_close(total.double(), wanted, rtol=1e-4, atol=0)
    ours, theirs = (torch.autograd.grad(loss, lm.lm_head.weight)[0] for loss in (total, wanted))
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)


MODELS = [tiny_llama, tiny_qwen2, tiny_gpt2, tiny_gemma2, tiny_gemma3, tiny_mistral, tiny_mixtral]


@pytest.mark.parametrize("make", MODELS)
def test_a_step_never_waits_for_the_device(tmp_path, make):
    lm, (ids, labels) = AutoModelForCausalLM.from_pretrained(make(tmp_path / "m")), labelled(3, 24)
    wanted = lm(input_ids=ids, use_cache=False).logits
    with NoWaits():
        losses.objective(lm, lm, ids, 0.5, labels)[0].backward()
        found = losses.next_token_logits(lm, ids)
    assert torch.equal(found, wanted.flatten(0, 1))
    assert all(weight.grad is not None for weight in lm.parameters())


def test_transformers_alone_would_wait(lm):
    with NoWaits(), pytest.raises(AssertionError, match="waits"):
        lm(input_ids=tokens(3, 24), use_cache=False)


@pytest.mark.parametrize("distillation", [0.0, 0.3, 1.0])
def test_a_compiled_loss_is_the_eager_one(lm, monkeypatch, distillation):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    monkeypatch.setattr(losses, "_COMPILED_SLICE_BYTES", 4 * VOCAB_SIZE * SLICE)
    losses._compiled.cache_clear()
    teacher, (ids, labels) = copy.deepcopy(lm), labelled(5, 24)
    teacher.lm_head.weight.data *= 1.5
    results = []
    for compiled in (False, True):
        loss, _ = losses.objective(lm, teacher, ids, distillation, labels, compiled)
        results.append([loss, torch.autograd.grad(loss, lm.lm_head.weight)[0]])
    losses._compiled.cache_clear()
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-7)


def test_gradients_come_from_tokens_that_count_alone(lm):
    logits = torch.randn(3 * 12, VOCAB_SIZE, generator=torch.Generator().manual_seed(3)).requires_grad_()
    ids, labels = labelled(3, 12)
    labels[1] = -100
    losses.nll_sum(logits, ids, losses.window_weights(labels)).backward()
    moved = logits.grad.view(3, 12, -1).any(-1)
    assert moved.tolist() == [[*(label != -100 for label in row[1:]), False] for row in labels.tolist()]
    assert logits.grad.isfinite().all(), "a window without any token that counts"
