"""Continuations against transformers' own `generate` and a loop without a cache; what they depend on."""

import json

import pytest
import torch
from transformers import GenerationConfig

from roi_lightning.errors import UserError
from roi_lightning.evaluation.continuations import (
    Decoding,
    continue_prompt,
    continue_prompts,
    encode_chat,
    encode_prompt,
    end_tokens,
    read_prompts,
)
from roi_lightning.learning.roi import RoILightningModule
from roi_lightning.masks.layer_mask import LayerMask
from roi_lightning.models.config import load_tokenizer
from roi_lightning.models.freezing import enable_checkpointing
from roi_lightning.models.loading import load_language_model
from roi_lightning.models.masking import apply_masks
from roi_lightning.models.source import resolve_model
from tiny_models import EOS, tiny_gpt2, tiny_llama, tiny_tokenizer

TEXTS = ["ab, the cat", "x", "a longer one: 1 2 3 4 5 6"]


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    folder = tiny_llama(tmp_path_factory.mktemp("continuations") / "llama")
    return load_language_model(resolve_model(str(folder))), load_tokenizer(str(folder))


def greedy_without_cache(lm, ids, count, ends):
    """The most probable token, again and again, over the whole text each time."""
    ids, new = list(ids), []
    for _ in range(count):
        with torch.no_grad():
            logits = lm(input_ids=torch.tensor([ids + new]), use_cache=False).logits
        new.append(int(logits[0, -1].argmax()))
        if new[-1] in ends:
            break
    return new


@pytest.mark.parametrize("make", [tiny_llama, tiny_gpt2])
def test_greedy_is_the_most_probable_token_again_and_again(make, tmp_path):
    lm = load_language_model(resolve_model(str(make(tmp_path / "model"))))
    tokenizer = tiny_tokenizer()
    # What a model may bring along, and which must not count.
    lm.generation_config = GenerationConfig(do_sample=True, temperature=5.0, repetition_penalty=3.0)
    enable_checkpointing(lm)  # keeps no cache in train mode, in which a learner's model is
    lm.train()
    for text in TEXTS:
        ids = encode_prompt(tokenizer, text)
        made = continue_prompt(lm, tokenizer, ids, Decoding(max_new_tokens=8))
        wanted = greedy_without_cache(lm, ids, 8, [256])
        assert made.text == tokenizer.decode(wanted, skip_special_tokens=True)
        assert made.tokens == len(wanted)
    assert lm.training
    assert lm.generation_config.repetition_penalty == 3.0


def test_it_ends_at_the_tokens_that_the_model_or_the_tokenizer_names(llama):
    lm, tokenizer = llama
    ids = encode_prompt(tokenizer, TEXTS[0])
    made = greedy_without_cache(lm, ids, 8, [])
    before = lm.generation_config
    try:
        lm.generation_config = GenerationConfig(eos_token_id=[made[3], 7])
        assert end_tokens(lm, tokenizer) == [made[3], 7, 256]
        first = made.index(made[3]) + 1
        assert continue_prompt(lm, tokenizer, ids, Decoding(max_new_tokens=8)).tokens == first
    finally:
        lm.generation_config = before


def test_draws_are_those_of_transformers_and_no_prompt_changes_another_s(llama):
    lm, tokenizer = llama
    decoding = Decoding(max_new_tokens=8, temperature=1.5, top_p=0.9, seed=3)
    prompts = [encode_prompt(tokenizer, text) for text in TEXTS]
    state = torch.get_rng_state()
    made = continue_prompts(lm, tokenizer, prompts, decoding)
    assert torch.equal(torch.get_rng_state(), state), "nobody else's random numbers are used up"
    assert [x.text for x in continue_prompts(lm, tokenizer, prompts[::-1], decoding)] == [
        x.text for x in made[::-1]
    ]
    for ids, one in zip(prompts, made, strict=True):
        torch.manual_seed(3)
        options = {"do_sample": True, "temperature": 1.5, "top_p": 0.9, "top_k": 0, "use_cache": True}
        own = lm.eval().generate(
            torch.tensor([ids]), attention_mask=torch.ones(1, len(ids)), max_new_tokens=8, **options
        )
        assert one.text == tokenizer.decode(own[0, len(ids) :], skip_special_tokens=True)
    other = continue_prompts(lm, tokenizer, prompts, Decoding(max_new_tokens=8, temperature=1.5, seed=4))
    assert [x.text for x in other] != [x.text for x in made]


def test_a_learner_s_model_continues_as_the_masked_one_does(llama):
    source = llama[0].name_or_path
    module = RoILightningModule(source)
    lm, tokenizer = module.model, tiny_tokenizer()
    generator = torch.Generator().manual_seed(0)
    for layer in module.layers.values():
        layer.logits.data.copy_(torch.randn(layer.logits.shape, generator=generator))
    dense, masked = (load_language_model(resolve_model(source)) for _ in range(2))
    apply_masks(masked, module.mask_set())
    prompts, decoding = [encode_prompt(tokenizer, text) for text in TEXTS], Decoding(max_new_tokens=8)

    def texts(model):
        return [x.text for x in continue_prompts(model, tokenizer, prompts, decoding)]

    module.state.mode = "sample"
    with module.under_masks():
        learned = texts(lm)
    with module.dense():
        unpruned = texts(lm)
    with module.under_masks({name: LayerMask.to_rows(x) for name, x in given(module).items()}):
        others = texts(lm)
    assert learned == texts(masked)
    assert unpruned == texts(dense)
    assert len({*map(tuple, (learned, unpruned, others))}) == 3
    assert module.state.mode == "sample"


def given(module):
    """Masks that keep the last two of every four."""
    last = torch.tensor([False, False, True, True])
    return {
        name: layer.packed(last.repeat(layer.weight.shape[0], layer.weight.shape[1] // 4))
        for name, layer in module.layers.items()
    }


def test_a_text_begins_with_the_bos_that_the_tokenizer_puts_there(llama):
    from tokenizers import processors

    tokenizer = tiny_tokenizer()
    plain = encode_prompt(tokenizer, "ab")
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{EOS} $A {EOS}", special_tokens=[(EOS, 256)]
    )
    assert encode_prompt(tokenizer, "ab") == [256, *plain], "and without the EOS behind it"


def test_a_chat_is_what_the_template_makes_of_it():
    tokenizer = tiny_tokenizer()
    with pytest.raises(UserError, match=r"has no chat template; leave --chat out"):
        encode_chat(tokenizer, [{"role": "user", "content": "ab"}])
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        "<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<me>{% endif %}"
    )
    ids = encode_chat(tokenizer, [{"role": "user", "content": "ab"}])
    assert tokenizer.decode(ids) == "<user>ab<me>"
    with pytest.raises(UserError, match="refuses the conversation: no system"):
        encode_chat(tokenizer, [{"role": "system", "content": "ab"}])


def test_prompts_of_a_file(tmp_path):
    lines, rows, bad = tmp_path / "a.txt", tmp_path / "a.jsonl", tmp_path / "bad.jsonl"
    lines.write_text("one\n\n two\n", encoding="utf-8")
    rows.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("a\nb", "c")))
    bad.write_text('{"text": "a"}\n')
    assert read_prompts(lines) == ["one", " two"]
    assert read_prompts(rows) == ["a\nb", "c"]
    for file, said in ((bad, "KeyError"), (tmp_path / "none", "No such file")):
        with pytest.raises(UserError, match=rf"{said}.*give UTF-8 text with a prompt per line"):
            read_prompts(file)
    lines.write_text("\n")
    with pytest.raises(UserError, match="holds no prompt"):
        read_prompts(lines)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"temperature": -1.0}, "temperature is -1"),
        ({"temperature": 1.0, "top_p": 0.0}, "top_p 0; give"),
        ({"top_p": 0.9}, "nothing is drawn at temperature 0; set temperature"),
    ],
)
def test_numbers_out_of_range_are_refused(options, said):
    with pytest.raises(UserError, match=said):
        Decoding(**options)
