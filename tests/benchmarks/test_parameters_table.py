"""The page of learned parameters, against a count from the models' shapes alone."""

from math import comb
from pathlib import Path

import pytest

from benchmarks.parameters_table import (
    MODELS,
    PATTERNS,
    counted_table,
    counts,
    printed_table,
)
from benchmarks.plan_table import shapes

PAGE = Path(__file__).parents[2] / "benchmarks/results/parameters.md"


def prunable(lm):
    """Weights of the seven projections of every block."""
    sizes = shapes()[lm]
    hidden, heads = sizes["hidden_size"], sizes["num_attention_heads"]
    head = sizes.get("head_dim", hidden // heads)
    queries, keys = hidden * heads * head, hidden * sizes["num_key_value_heads"] * head
    return sizes["num_hidden_layers"] * (2 * queries + 2 * keys + 3 * hidden * sizes["intermediate_size"])


def closed_form(lm):
    weights = prunable(lm)
    numbers = {pattern: tuple(map(int, pattern.split(":"))) for pattern in PATTERNS}
    found = {("RoI", pattern): weights for pattern in PATTERNS} | {("ProxSparse", "2:4"): weights}
    return found | {("MaskLLM", pattern): weights // m * comb(m, n) for pattern, (n, m) in numbers.items()}


def test_the_page_has_the_numbers_of_weights_and_candidates():
    found, page = {lm: closed_form(lm) for lm in MODELS}, PAGE.read_text()
    assert counted_table(found) in page
    assert printed_table(found) in page


@pytest.mark.slow
@pytest.mark.parametrize("lm", MODELS)
def test_plan_counts_so_many(lm):
    assert counts(lm) == closed_form(lm)
