"""`benchmarks.decode`: tokens against a slow loop, bytes against sums of stored tensors."""

import json

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from benchmarks.decode import main
from benchmarks.speed import timing
from benchmarks.speed.generation import (
    GenerationConfig,
    generate,
    random_prompts,
    scores_at,
)
from benchmarks.speed.models import make_pair
from benchmarks.speed.timing import weight_bytes
from helpers.lab import plain_text
from helpers.tiny_models import random_masks, tiny_llama, tiny_qwen2
from roi_lightning.export import write_export
from roi_lightning.models.loading import plain_language_model
from roi_lightning.models.source import resolve_model

PROMPT, TOKENS = 6, 9
PRUNABLE = 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128)


@pytest.fixture(autouse=True)
def _small_caches(monkeypatch):
    """As if caches held next to nothing, so that little is read to learn what memory gives."""
    monkeypatch.setattr(timing, "_MIN_BYTES", 1 << 16)
    monkeypatch.setattr(timing, "_TIMES_THE_CACHE", 0)


def export(folder, build, pattern="2:4", **options):
    source = resolve_model(str(build(folder / "base", **options)))
    return write_export(source, random_masks(source, pattern), folder / "export")


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A 2:4 Llama in float32, where nothing is near a tie; its head is a matrix of its own."""
    return export(tmp_path_factory.mktemp("llama"), tiny_llama)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    """A 2:4 Qwen2 in bfloat16, its head tied to the embeddings."""
    return export(tmp_path_factory.mktemp("qwen"), tiny_qwen2)


def load(directory):
    return plain_language_model(resolve_model(str(directory)))


def greedy(lm, ids, tokens):
    """New tokens and the logits that each was chosen from, by whole passes without a cache."""
    logits = []
    with torch.no_grad():
        for _ in range(tokens):
            logits.append(lm(ids, use_cache=False).logits[:, -1])
            ids = torch.cat([ids, logits[-1].argmax(-1, keepdim=True)], 1)
    return ids[:, -tokens:], torch.stack(logits, 1)


def test_generation_is_that_of_a_slow_loop_and_no_token_ends_it(llama):
    lm, ids = load(llama), random_prompts(256, 2, PROMPT)
    wanted, logits = greedy(lm, ids, TOKENS)
    lm.generation_config.eos_token_id = int(wanted[0, 1])
    made = generate(lm, ids, GenerationConfig(TOKENS))
    assert made.tokens.tolist() == wanted.tolist()
    stored = 2 * 2 * 2 * 16 * 4  # blocks, keys and values, heads, numbers in each, bytes of a number
    assert made.cache_bytes == 2 * (PROMPT + TOKENS - 1) * stored
    found = scores_at(lm, ids, GenerationConfig(TOKENS), {0: 3, 1: 0})
    for sequence, position in ((0, 3), (1, 0)):
        torch.testing.assert_close(found[sequence], logits[sequence, position], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("name", "tied"), [("llama", False), ("qwen", True)])
def test_a_step_reads_every_weight_once(name, tied, request):
    directory = request.getfixturevalue(name)
    lm = load(directory)
    stored = load_file(directory / "model.safetensors")
    frequencies = sum(buffer.nbytes for buffer in lm.buffers())
    embeddings = 0 if tied else stored["model.embed_tokens.weight"].nbytes
    dense = sum(tensor.nbytes for tensor in stored.values()) - embeddings
    assert weight_bytes(lm) == dense + frequencies
    pair = make_pair(lm)
    itemsize = lm.dtype.itemsize
    fewer = PRUNABLE * itemsize - (PRUNABLE // 2 * itemsize + PRUNABLE // 8)
    assert weight_bytes(pair.packed) == dense + frequencies - fewer
    assert weight_bytes(pair.dense) == dense + frequencies, "the twin shares nothing with it"


def test_rows_of_every_batch(llama, tmp_path, capsys):
    out, picture = tmp_path / "rows.json", tmp_path / "rows.png"
    size = ("--batch", "1,3", "--prompt", str(PROMPT), "--tokens", str(TOKENS), "--rounds", "2")
    main(["--lm", str(llama), *size, "--json", str(out), "--figure", str(picture)])
    rows = {(row["name"], row["batch"]): row for row in json.loads(out.read_text())["rows"]}
    assert set(rows) == {(f"{phase}.packed_over_dense", b) for phase in ("prefill", "decode") for b in (1, 3)}
    for (name, batch), row in rows.items():
        count = PROMPT if name.startswith("prefill") else TOKENS - 1
        assert row["tokens_per_s"] == pytest.approx(batch * count / row["median_s"])
        assert (row["attention"], row["dtype"], row["layers_left_dense"]) == ("sdpa", "float32", 0)
    cache = 2 * 2 * 2 * 16 * 4 * (PROMPT + TOKENS / 2)
    for batch in (1, 3):
        row = rows["decode.packed_over_dense", batch]
        weights = weight_bytes(load(llama))
        assert row["same_tokens"]
        assert row["dense_weight_bytes"] == weights - PRUNABLE * 4
        rate = row["bandwidth_bytes_per_s"] / row["reference_bytes_per_token"]
        assert row["reference_most_tokens_per_s"] == pytest.approx(rate)
        assert row["reference_bytes_per_token"] == pytest.approx(weights / batch + cache)
    with Image.open(picture) as image:
        assert image.format == "PNG"
    assert "sdpa attention" in plain_text(capsys.readouterr().out)
