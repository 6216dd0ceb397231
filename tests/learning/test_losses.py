"""The loss against transformers' own and torchmetrics'."""

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torchmetrics.text import Perplexity
from transformers import AutoModelForCausalLM

from roi_lightning.evaluation import window_perplexity
from roi_lightning.learning import losses
from roi_lightning.learning.losses import next_token_nll
from tiny_models import VOCAB_SIZE, tiny_llama

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


def test_the_gradients_are_those_of_plain_cross_entropy(lm):
    ids = tokens(9, 64)
    next_token_nll(lm, ids)[0].backward()
    ours = {name: p.grad.clone() for name, p in lm.named_parameters()}
    lm.zero_grad()
    logits = lm(input_ids=ids).logits[:, :-1]
    F.cross_entropy(logits.reshape(-1, VOCAB_SIZE), ids[:, 1:].reshape(-1), reduction="sum").backward()
    for name, parameter in lm.named_parameters():
        torch.testing.assert_close(ours[name], parameter.grad, rtol=1e-4, atol=1e-4, msg=name)


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


@pytest.mark.parametrize("batch_size", [1, 2, 5])
def test_window_perplexity_agrees_with_torchmetrics_on_a_mild_model(lm, batch_size):
    ids = tokens(5, 24)
    theirs = Perplexity()
    with torch.no_grad():
        theirs.update(lm(input_ids=ids).logits[:, :-1], ids[:, 1:])
    assert window_perplexity(lm, ids, batch_size) == pytest.approx(float(theirs.compute()), rel=1e-4)


def test_a_confident_error_is_a_number_and_not_infinite(lm):
    ids = tokens(1, 16)
    with torch.no_grad():
        lm.lm_head.weight.mul_(3000)
    nll, count = next_token_nll(lm, ids)
    assert nll / count > 100
    assert nll.isfinite()
