"""Sampled documents against the model's own probabilities and a loop over one document without a cache."""

import numpy as np
import pytest
import torch
from transformers import GenerationConfig

from helpers.text_files import byte_tokenizer
from helpers.tiny_models import tiny_gemma3, tiny_gpt2, tiny_llama, tiny_mixtral, tiny_tokenizer
from roi_lightning.contrib.self_text.samples import (
    Document,
    Selection,
    draw_tokens,
    sample_documents,
)
from roi_lightning.contrib.self_text.settings import SampleSettings
from roi_lightning.errors import UserError
from roi_lightning.models.loading import load_language_model
from roi_lightning.models.source import resolve_model

ENDS = [*range(30), 256]  # so many that documents end


def load(builder, folder):
    """A tiny model that is sure of some tokens, and ends its texts."""
    lm = load_language_model(resolve_model(str(builder(folder / "model"))), "float32")
    if not lm.config.tie_word_embeddings:  # where they are tied it would say the same word again and again
        lm.get_output_embeddings().weight.data *= 15
    lm.generation_config = GenerationConfig(eos_token_id=ENDS[:-1])
    return lm


def slow_document(lm, tokenizer, seed, number, longest):
    """The whole text again for every token, the sum of probabilities in a loop."""
    draws, ids = np.random.default_rng([seed, number]).random(longest), [256]
    for draw in draws:
        with torch.no_grad():
            logits = lm(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]
        total, token = 0.0, -1
        for token, share in enumerate(logits.double().softmax(-1).tolist()):  # noqa: B007
            total += share
            if total > draw:
                break
        if token in ENDS:
            return Document(tokenizer.decode(ids[1:], skip_special_tokens=True), True)
        ids.append(token)
    return Document(tokenizer.decode(ids[1:], skip_special_tokens=True), False)


@pytest.mark.parametrize(
    "builder",
    [tiny_llama, tiny_gemma3, *(pytest.param(x, marks=pytest.mark.slow) for x in (tiny_gpt2, tiny_mixtral))],
)
def test_documents_side_by_side_are_those_of_a_slow_loop(builder, tmp_path):
    lm, tokenizer = load(builder, tmp_path), tiny_tokenizer()
    settings = SampleSettings(max_tokens=12, seed=5)
    state, seen = torch.get_rng_state(), []
    made = sample_documents(lm, tokenizer, settings, range(3, 15), seen.append)
    assert made == [slow_document(lm, tokenizer, 5, number, 12) for number in range(3, 15)]
    assert {document.ended for document in made} == {True, False}
    assert lm.training
    assert torch.equal(torch.get_rng_state(), state), "nobody else's random numbers are used up"
    assert seen[0] == 12
    assert seen == sorted(seen)
    assert sample_documents(lm, tokenizer, settings, range(7, 9)) == made[4:6], "alone as among others"


def test_draws_at_the_edges_of_the_distribution():
    logits = torch.tensor([[0.0, -torch.inf, 0.0, 0.0, -torch.inf]])
    draws = torch.tensor([0.0, 0.33, 0.34, 0.67, 1 - 2**-53], dtype=torch.float64)
    assert draw_tokens(logits.expand(5, -1), draws).tolist() == [0, 0, 2, 3, 3]


def kept(*texts, enough=10**6):
    selection = Selection(byte_tokenizer())
    selection.add([Document(text, text.endswith(".")) for text in texts], enough)
    return selection


def test_empty_documents_repeats_and_loops_are_dropped_and_counted():
    loop = "and on and on " * 20
    half = "".join(map(chr, range(33, 123))) + "on and " * 5
    selection = kept("One.", "", "two", " \n", "One.", loop, half, "abcdefg.")
    assert list(selection.texts) == ["One.", "two", half, "abcdefg."]
    assert selection.facts() == {
        "documents": 4,
        "tokens": 4 + 3 + len(half) + 8,
        "ended": 2,
        "dropped": {"empty": 2, "repeats": 1, "loops": 1},
    }
    assert selection.written == 8


def test_a_model_that_writes_nothing_is_not_asked_for_ever():
    with pytest.raises(UserError, match=r"last 256 documents were dropped \(in all 256 empty.*; set start"):
        kept("a", *[""] * 256)
    assert kept(*[""] * 255, "a").tokens == 1
