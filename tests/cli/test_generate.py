"""`generate` from the command line: every kind of model side by side, files, conversations, and what it refuses."""

import io
import json
import sys

import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM

from cli_helpers import plain_text, run
from roi_lightning.evaluation.side_by_side import SideBySide, as_markdown, print_side_by_side
from roi_lightning.export import write_export
from roi_lightning.models.source import resolve_model
from tiny_models import random_masks, tiny_llama, tiny_tokenizer

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
PROMPTS = ["the cat sat", "x = 1"]


class Place:
    """A folder with a base model, one that can chat, an export, and that packed."""

    def __init__(self, folder):
        self.base, self.export, self.packed = folder / "base", folder / "export", folder / "packed"
        self.chatty, self.mask = folder / "chatty", folder / "export" / "roi_mask.safetensors"
        source = resolve_model(str(tiny_llama(self.base)))
        write_export(source, random_masks(source), self.export)
        assert run("pack", self.export, "--out", self.packed) == 0
        tokenizer = tiny_tokenizer()
        tokenizer.chat_template = TEMPLATE
        tokenizer.save_pretrained(tiny_llama(self.chatty, seed=1))


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return Place(tmp_path_factory.mktemp("place"))


def generated(folder, text, count=6):
    """By transformers alone."""
    lm, tokenizer = AutoModelForCausalLM.from_pretrained(folder), tiny_tokenizer()
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    out = lm.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False)
    return tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)


def test_every_kind_of_model_side_by_side(place, tmp_path, capsys):
    kinds = [str(place.base), str(place.mask), str(place.packed), str(place.export)]
    file = tmp_path / "prompts.txt"
    file.write_text(PROMPTS[1] + "\n")
    out, markdown = tmp_path / "o.json", tmp_path / "o.md"
    words = ["--base", place.base, "--prompt", PROMPTS[0], "--prompts", file, "--max_new_tokens", 6]
    assert run("generate", *kinds, *words, "--json", out, "--markdown", markdown) == 0
    found, said = json.loads(out.read_text()), capsys.readouterr().out
    assert [item["prompt"] for item in found["continuations"]] == PROMPTS
    assert found["generation"]["method"] == "greedy"
    assert list(found["tokens_per_second"]) == kinds
    for item in found["continuations"]:
        assert list(item["answers"]) == kinds
        dense, masked = (generated(folder, item["prompt"]) for folder in (place.base, place.export))
        assert list(item["answers"].values()) == [dense, masked, masked, masked]
        assert dense != masked
        for text in (item["prompt"], dense, masked):
            assert text in said
            assert text in markdown.read_text()
    assert said.count("=== prompt ") == 2
    assert said.count("tokens/s)") == 8


def test_draws_repeat_with_their_seed(place, tmp_path):
    def texts(*more):
        words = ["--prompt", *PROMPTS, "--temperature", "1", "--top_p", ".9", "--max_new_tokens", 8, *more]
        assert run("generate", place.base, *words, "--json", tmp_path / "o.json") == 0
        found = json.loads((tmp_path / "o.json").read_text())
        return [item["answers"][str(place.base)] for item in found["continuations"]], found["generation"]

    first, second, other = texts(), texts(), texts("--seed", "1")
    assert first == second
    assert other[0] != first[0]
    assert first[1]["method"] == "sampled at temperature 1, top_p 0.9, seed 0"


def test_a_turn_of_a_chat_is_continued_by_the_template(place, tmp_path):
    words = ["--chat", "--prompt", "hello", "--max_new_tokens", 6, "--json", tmp_path / "o.json"]
    assert run("generate", place.chatty, *words) == 0
    (item,) = json.loads((tmp_path / "o.json").read_text())["continuations"]
    assert item["answers"] == {str(place.chatty): generated(place.chatty, "<user>hello\n<assistant>")}


def talk(monkeypatch, *lines):
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(line + "\n" for line in lines)))


def test_a_conversation_through_a_pipe(place, monkeypatch, capsys):
    talk(monkeypatch, "hello", "", "and", "/reset", "hello", "/exit", "never read")
    assert run("generate", place.chatty, "--chat", "--max_new_tokens", 6) == 0
    first = generated(place.chatty, "<user>hello\n<assistant>")
    second = generated(place.chatty, f"<user>hello\n<assistant>{first}\n<user>and\n<assistant>")
    assert capsys.readouterr().out == f"{first}\n{second}\na new conversation\n{first}\n"


def test_several_models_answer_in_turn_until_the_lines_end(place, monkeypatch, capsys):
    other = place.chatty.parent / "other"
    if not other.exists():
        tokenizer = tiny_tokenizer()
        tokenizer.chat_template = TEMPLATE
        tokenizer.save_pretrained(tiny_llama(other, seed=2))
    talk(monkeypatch, "x" * 200, "hello")
    assert run("generate", place.chatty, other, "--chat", "--max_new_tokens", 6) == 0
    said, told = capsys.readouterr()
    chat = "<user>hello\n<assistant>"
    answers = [f"[{x}]\n{generated(x, chat)}\n" for x in (place.chatty, other)]
    assert said == f"[{place.chatty}]\n[{other}]\n{''.join(answers)}", "what was too long is forgotten"
    assert told.count("are more than the model's 128; shorten it or lower max_new_tokens; /reset begins") == 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "there is no prompt; give some with --prompt or --prompts"),
        (["--chat"], "has no chat template; leave --chat out"),
        (["--chat", "--prompt", "a"], "has no chat template; leave --chat out"),
        (["--chat", "--json", "o.json"], "a conversation is not written to --json"),
        (["--prompt", "a", "--prompts", "none.txt"], "'none.txt' can't be read"),
        (["--prompt", "a" * 100], "a prompt of 100 tokens and 64 new ones are more than the model's 128"),
        (["--prompt", ""], "a prompt is empty"),
        (["--prompt", "a", "--top_p", "0.5"], "nothing is drawn at temperature 0"),
        (["--prompt", "a", "--json", "base/config.json/o.json"], "config.json"),
    ],
)
def test_what_can_t_be_done_is_refused_before_a_model_is_loaded(place, monkeypatch, capsys, words, said):
    monkeypatch.chdir(place.base.parent)
    monkeypatch.setattr("roi_lightning.evaluation.models.EvaluatedModel.load", None)
    assert run("generate", "base", *words) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert said in error


def test_columns_where_they_fit_else_panels():
    items = [SideBySide("[b]p[/b]", "held-out text", "truth", {"one": "[red]a[/red] " * 9, "two": "b"})]
    shown = {}
    for width in (120, 60):
        console = Console(width=width, file=io.StringIO(), force_terminal=True)
        print_side_by_side(items, {"one": "(1.0 tokens/s)"}, console)
        shown[width] = console.file.getvalue()
        assert max(len(plain_text(line)) for line in shown[width].splitlines()) <= width
        text = plain_text(shown[width].replace("\n", " "))
        for part in ("[b]p[/b]", "one (1.0 tokens/s)", "two", "truth", "[red]a[/red] [red]a[/red]"):
            assert part in text
    heads = [next(line for line in text.splitlines() if "the text itself" in line) for text in shown.values()]
    assert ["two" in line for line in heads] == [True, False]


def test_markdown_shows_texts_as_they_stand():
    text = as_markdown([SideBySide("a", answers={"m": "```\n# no heading"})])
    assert "````text\n```\n# no heading\n````" in text
