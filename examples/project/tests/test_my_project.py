"""The project's classes by themselves, and in a run on a tiny random model: no network, less than a minute."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from my_project import Ramp, unevenness
from my_project.__main__ import Command
from roi_lightning.__main__ import main

CONFIG = Path(__file__).parents[1] / "configs/my_project.yaml"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A random Llama of two blocks, with a token for every byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {token: number for number, token in enumerate([*alphabet, "<end>"])}
    bytewise = Tokenizer(models.BPE(vocab=words, merges=[]))
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    PreTrainedTokenizerFast(tokenizer_object=bytewise, eos_token="<end>").save_pretrained(tmp_path / "model")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = AutoConfig.for_model("llama", vocab_size=len(words), max_position_embeddings=64, **sizes)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_the_ramp_waits_then_rises_to_its_end() -> None:
    """Half way up the line is half of the end."""
    ramp = Ramp(end=2.0, begin=0.5)
    assert [ramp.at(step, 100) for step in (0, 50, 75, 100)] == [0, 0, 1, 2]


def test_a_mask_that_keeps_as_much_of_every_input_costs_nothing() -> None:
    """And one that drops inputs altogether costs the most."""
    dense, rows = torch.ones(4, 4), torch.tensor([1.0, 0, 1, 0])
    alternating = torch.stack([rows, 1 - rows, rows, 1 - rows])
    assert unevenness(alternating, dense) == 0
    assert unevenness(dense * rows, dense) == pytest.approx(1 / 3)


def test_a_run_ends_with_two_of_every_four_weights(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the project's own command, with its configuration."""
    monkeypatch.chdir(tmp_path)
    text = ["--corpora", "email", "--data.held_out_fraction", "0.2", "--seq_len", "32"]
    size = ["--steps", "2", "--model.prior_windows", "2", "--trainer.accelerator", "cpu"]
    words = ["fit", "--config", str(CONFIG), "--lm", str(model), *text, *size]
    assert main(words, cli=Command) == 0
    weights = load_file("runs/my_project/export/model.safetensors")
    pruned = [weight for name, weight in weights.items() if "_proj" in name]
    assert len(pruned) == 14
    assert all(((weight.view(-1, 4) != 0).sum(1) <= 2).all() for weight in pruned)
