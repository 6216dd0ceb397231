"""`evaluate` from the command line: figures, tables, files, and what it refuses."""

import importlib.util
import io
import json
import math
import re
import shutil
import sys
from dataclasses import replace
from functools import cached_property
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from helpers.lab import make_lab, plain_text, run
from helpers.refusals import Bench, assert_refused
from helpers.slow_perplexity import by_a_loop
from helpers.text_files import CHAT_TEMPLATE, write_jsonl
from helpers.tiny_models import tiny_llama, tiny_qwen2, tiny_tokenizer
from roi_lightning.evaluation.config import EvalConfig
from roi_lightning.evaluation.report import as_json
from roi_lightning.evaluation.results_table import make_table
from roi_lightning.evaluation.run import Evaluation
from roi_lightning.export.sidecar import read_sidecar, write_sidecar
from roi_lightning.masks.mask_set import MaskSet
from roi_lightning.models.loading import load_language_model
from roi_lightning.models.source import resolve_model

TEXT = "A text of some length, so that it fills more than two windows. " * 9 + "End."
needs_harness = pytest.mark.skipif(importlib.util.find_spec("lm_eval") is None, reason="needs lm-eval")


class Place(Bench):
    """A bench with a text of more than two windows, and a few questions."""

    @cached_property
    def text(self):
        return self.write("text.txt", TEXT)

    @cached_property
    def data(self):
        choices = {"text": ["a stone", "an apple", "tin"], "label": ["A", "B", "C"]}
        eaten = [{"question": f"{x} eats?", "choices": choices, "answerKey": "B"} for x in "abc"]
        opened = [{"goal": "open it", "sol1": "pull", "sol2": "sing a song", "label": i} for i in (0, 1)]
        pages = [{"page": " = A page = \n Some words , and more . \n" * 5}]
        for name, rows in {"arc_easy": eaten, "piqa": opened, "wikitext": pages}.items():
            self.write(f"data/{name}.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
        return self.folder / "data"


@pytest.fixture
def place(tmp_path, tmp_path_factory, monkeypatch):
    lab = make_lab(tmp_path, tmp_path_factory, monkeypatch)
    return Place(lab.folder, lab.shared)


def measure(place, *args):
    assert run("evaluate", *args, "--text", place.text, "--seq_len", 64, "--json", "o.json") == 0
    return json.loads((place.folder / "o.json").read_text())


def test_token_perplexity_is_the_loop_s_and_a_mask_equals_its_export(place, capsys):
    names = [str(place.model), str(place.export), str(place.mask)]
    found = measure(place, *names, "--base", place.model)["models"]
    ids = torch.tensor(tiny_tokenizer()(TEXT)["input_ids"])
    for name in names[:2]:
        wanted = by_a_loop(load_language_model(resolve_model(name)), ids.split(64))
        assert found[name]["token_perplexity"] == pytest.approx(wanted, rel=1e-2), "bfloat16, other batches"
    assert found[names[2]] == found[names[1]] != found[names[0]]
    assert list(found) == names
    assert str(place.export)[-20:] in capsys.readouterr().out


@needs_harness
def test_all_kinds_of_tasks_in_one_run(place, tmp_path, capfd):
    tasks = "piqa,arc_easy,word_perplexity,token_perplexity"
    arguments = [place.model, place.mask, "--base", place.model, "--tasks", tasks, "--task_data", place.data]
    found = measure(place, *arguments, "--markdown", tmp_path / "o.md")
    figures = found["models"][str(place.mask)]
    assert set(figures) == {"token_perplexity", "word_perplexity", "arc_easy", "piqa", "average"}
    assert set(figures["arc_easy"]) == {"acc", "acc_norm", "acc_stderr", "acc_norm_stderr", "samples"}
    assert (figures["arc_easy"]["samples"], figures["piqa"]["samples"]) == (3, 2)
    assert figures["average"]["acc"] == pytest.approx(
        (figures["arc_easy"]["acc"] + figures["piqa"]["acc"]) / 2
    )
    assert found["settings"]["dense"] == str(place.model)
    assert found["settings"]["tasks"] == ["token_perplexity", "word_perplexity", "arc_easy", "piqa"]
    assert found["settings"]["lm_eval"].startswith("0.4.")
    assert found["settings"]["word_length"] == dict.fromkeys(map(str, arguments[:2]), 128)
    assert "| ARC-E ↑ | PIQA ↑ | Average ↑ |" in (tmp_path / "o.md").read_text()
    assert "norm " in capfd.readouterr().out


@needs_harness
def test_the_limit_counts_everything_and_is_said(place, capsys):
    arguments = [place.model, "--tasks", "token_perplexity,arc_easy", "--task_data", place.data, "--limit", 1]
    found = measure(place, *arguments)
    ids = torch.tensor(tiny_tokenizer()(TEXT)["input_ids"])
    wanted = by_a_loop(load_language_model(resolve_model(str(place.model))), [ids[:64]])
    assert found["models"][str(place.model)]["token_perplexity"] == pytest.approx(wanted, rel=1e-2)
    assert found["models"][str(place.model)]["arc_easy"]["samples"] == 1
    assert found["settings"]["limit"] == 1
    assert "only the first 1 windows" in plain_text(capsys.readouterr().out)


def test_the_2048_variant_drops_the_tail(tmp_path):
    base = tiny_llama(tmp_path / "base", max_position_embeddings=2048)
    text = tmp_path / "text.txt"
    text.write_text("long text " * 500)
    ids = torch.tensor(tiny_tokenizer()("long text " * 500)["input_ids"])
    assert 2 * 2048 < len(ids) < 3 * 2048
    arguments = [base, "--tasks", "token_perplexity_2048", "--text", text, "--json", tmp_path / "o.json"]
    assert run("evaluate", *arguments) == 0
    found = json.loads((tmp_path / "o.json").read_text())["models"][str(base)]["token_perplexity_2048"]
    wanted = by_a_loop(load_language_model(resolve_model(str(base))), ids[: 2 * 2048].split(2048))
    assert found == pytest.approx(wanted, rel=1e-5)


def test_token_perplexities_need_no_harness(place, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert measure(place, place.model)["settings"]["lm_eval"] is None
    says = r"'arc_easy' needs .*pip install 'roi-lightning\[eval\]'"
    refused(place, capsys, says, place.model, "--text", place.text, "--tasks", "token_perplexity,arc_easy")


def test_an_updated_directory_is_marked(place, tmp_path, capsys):
    updated = shutil.copytree(place.export, tmp_path / "updated")
    content = {k: v for k, v in read_sidecar(updated).items() if k not in ("files", "checksum")}
    write_sidecar(updated, content | {"updated": {"a.weight": "0" * 64}})
    measure(place, place.model, place.export, updated)
    marks = re.findall(r"(?:model|export|updated) +│ +(\S) ", capsys.readouterr().out)
    assert marks == ["–", "✗", "✓"]


@pytest.fixture
def chats(place, tmp_path):
    """A model with a chat template, and a file of chats that need more than two windows."""
    model = shutil.copytree(place.model, tmp_path / "chat")
    tokenizer = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps(tokenizer | {"chat_template": CHAT_TEMPLATE}))
    talks = [
        [
            {"role": "user", "content": f"{n} and {n + 1}?"},
            {"role": "assistant", "content": f"{2 * n + 1}, and {n} dogs."},
        ]
        for n in range(8)
    ]
    return model, talks, write_jsonl(tmp_path / "chats.jsonl", talks, "messages")


def spelled(talks, answers_only):
    """Every token of chats and its label, from the letters of the template."""
    tokenizer, ids, labels = tiny_tokenizer(), [], []
    for (_, question), (_, answer) in (map(dict.values, talk) for talk in talks):
        asked, said = (tokenizer(x)["input_ids"] for x in (f"<user>{question}<assistant>", answer))
        end = [tokenizer.eos_token_id]
        ids += [*asked, *said, *end]
        labels += [-100] * len(asked) + said + [-100] if answers_only else [*asked, *said, *end]
    return torch.tensor(ids), torch.tensor(labels)


@pytest.mark.parametrize("loss_on", ["all", "answers"])
def test_chats_are_measured_on_all_tokens_or_on_answers(chats, tmp_path, loss_on):
    model, talks, file = chats
    text = f"{{source: {file}, messages_field: messages, loss_on: {loss_on}}}"
    options = ["--text", text, "--seq_len", 64, "--batch_size", 2, "--dtype", "float32"]
    assert run("evaluate", model, *options, "--json", tmp_path / "o.json") == 0
    found = json.loads((tmp_path / "o.json").read_text())
    lm = load_language_model(resolve_model(str(model)), "float32")
    losses = []
    for ids, labels in zip(*(x.split(64) for x in spelled(talks, loss_on == "answers")), strict=True):
        log_probs = lm(input_ids=ids[None]).logits[0, :-1].log_softmax(-1)
        losses += [-float(log_probs[i, x]) for i, x in enumerate(labels[1:].tolist()) if x != -100]
    wanted = math.exp(sum(losses) / len(losses))
    assert found["models"][str(model)]["token_perplexity"] == pytest.approx(wanted, rel=1e-5)
    assert found["settings"]["text"] == text


@needs_harness
def test_all_is_checked_before_a_model_is_loaded(place, capsys, monkeypatch):
    """The first model's weights are broken; the complaint is still about what comes later."""
    monkeypatch.setattr(
        "roi_lightning.evaluation.evaluated_models.load_language_model", lambda *_: pytest.fail("loaded")
    )
    broken, empty = (shutil.copytree(place.model, place.folder / name) for name in ("broken", "empty"))
    (broken / "model.safetensors").write_bytes(b"no weights")
    (empty / "model.safetensors").unlink()
    text, short = ["--text", place.text, "--seq_len", 64], place.write("short.txt", "a")
    boolq = ["--tasks", "token_perplexity,boolq", "--task_data", place.data]
    refused(place, capsys, "has 1 tokens", broken, "--text", short, "--seq_len", 64)
    refused(place, capsys, r"boolq\.jsonl", broken, *text, *boolq)
    refused(place, capsys, "no GGUF file", broken, "absent.gguf", *text)
    refused(place, capsys, r"holds no model\.safetensors", place.model, empty, *text)
    refused(place, capsys, "can't be read", broken, *text)


def refused(place, capsys, says, *args):
    assert_refused(place, capsys, ["evaluate", *args, "--json", "o.json", "--markdown", "o.md"], says)


def test_masks_need_a_base_they_were_made_for(place, capsys):
    text = ["--text", place.text, "--seq_len", 64]
    refused(place, capsys, "--base", place.mask, *text)
    other = tiny_qwen2(place.folder / "other", seed=3)
    refused(place, capsys, "another model", place.mask, "--base", other, *text)
    weights = shutil.copy(place.model / "model.safetensors", "weights.safetensors")
    refused(place, capsys, "mask file", weights, "--base", place.model)


def test_a_mask_of_updated_weights_is_refused(place, capsys):
    masks = MaskSet.load(place.mask)
    name, digest = next(iter(masks.base.sha256.items()))
    replace(masks, updated={name: digest}).save(place.folder / "mask.safetensors")
    says = "evaluate the directory it came from"
    refused(place, capsys, says, "mask.safetensors", "--base", place.model)


# Figures made up: A is dense; B, C and D are sparse, D with updated weights.
MADE_UP = {
    "A": {"token_perplexity": 10.0, "arc_easy": {"acc": 0.8, "acc_stderr": 0.02}, "boolq": {"acc": 0.7}},
    "B": {"token_perplexity": 12.5, "arc_easy": {"acc": 0.6, "acc_stderr": 0.03}, "boolq": {"acc": 0.65}},
    "C": {"token_perplexity": math.inf, "arc_easy": {"acc": 0.7, "acc_stderr": 0.01}, "boolq": {"acc": 0.5}},
    "D": {"token_perplexity": 20.0, "arc_easy": {"acc": 0.6, "acc_stderr": 0.03}, "boolq": {"acc": 0.71}},
}
UPDATED = {"A": None, "B": False, "C": False, "D": True}


def evaluation_of(results=MADE_UP, updated=UPDATED, dense="A", harness=None, **options):
    models = [
        SimpleNamespace(name=name, updated=updated[name], bos=None, word_length=4096) for name in results
    ]
    return Evaluation(models, EvalConfig(**options), results, dense, harness or {})


def made_up(**options):
    table = make_table(evaluation_of(**options))
    rows = {name: dict(zip(table.head[2:], cells, strict=True)) for name, (_, cells) in table.rows.items()}
    return table, rows


def delta(cell):
    return "".join(note for note in cell.notes if note[0] != "±")


def test_the_table_s_values_deltas_and_errors():
    table, rows = made_up()
    assert table.head == ["model", "W/U", "token PPL ↓", "ARC-E ↑", "BoolQ ↑"]
    assert {name: [cell.text for cell in row.values()] for name, row in rows.items()} == {
        "A": ["10.00", "80.00", "70.00"],
        "B": ["12.50", "60.00", "65.00"],
        "C": ["inf", "70.00", "50.00"],
        "D": ["20.00", "60.00", "71.00"],
    }
    assert {name: [delta(cell) for cell in row.values()] for name, row in rows.items()} == {
        "A": ["", "", ""],
        "B": ["×1.25", "-20.00", "-5.00"],
        "C": ["", "-10.00", "-20.00"],
        "D": ["×2.00", "-20.00", "+1.00"],
    }
    assert [rows[name]["ARC-E ↑"].notes[-1] for name in "ABCD"] == ["±2.00", "±3.00", "±1.00", "±3.00"]
    assert [mark for mark, _ in table.rows.values()] == ["–", "✗", "✗", "✓"]


def test_the_best_and_second_of_the_sparse_rows_are_marked():
    _, rows = made_up()
    assert {name: [cell.rank for cell in row.values()] for name, row in rows.items()} == {
        "A": ["", "", ""],
        "B": ["best", "second", "second"],
        "C": ["", "best", ""],
        "D": ["second", "second", "best"],
    }


def test_columns_of_other_tasks_have_their_own_scale_and_direction():
    """A group stands for its members, a task's first metric for its others."""
    dense = {"a": {"acc,x": 0.5, "acc_stderr,x": 0.1, "acc,y": 0.6, "f1,x": 0.3}, "b": {"bits_per_byte": 2.0}}
    other = {"a": {"acc,x": 0.25, "acc,y": 0.7, "f1,x": 0.3}, "b": {"bits_per_byte": 1.5}}
    results = {
        name: found | {"g": {"acc": 0.5}, "m": {"acc": 0.5}} for name, found in (("A", dense), ("B", other))
    }
    harness = {"higher_is_better": {"b": {"bits_per_byte": False}}}
    harness |= {"groups": {"g": {}}, "group_subtasks": {"g": ["m"], "bag": ["b"]}}
    _, rows = made_up(results=results, harness=harness)
    assert list(rows["A"]) == ["a acc,x ↑", "a acc,y ↑", "b bits_per_byte ↓", "g acc ↑"]
    assert [cell.text for cell in rows["A"].values()] == ["50.00", "60.00", "2.0000", "50.00"]
    assert [cell.notes for cell in rows["B"].values()] == [("-25.00",), ("+10.00",), ("-0.5000",), ("+0.00",)]
    assert rows["A"]["a acc,x ↑"].notes == ("±10.00",)


def test_json_comes_back_as_it_was_with_infinity_spelled_out(tmp_path):
    evaluation = evaluation_of(tasks="token_perplexity,arc_easy,boolq", text=tmp_path / "some.txt", limit=3)
    found = json.loads(json.dumps(as_json(evaluation, device="cpu"), allow_nan=False))
    assert found["models"]["C"]["token_perplexity"] == "inf"
    assert found["models"]["B"] == MADE_UP["B"]
    assert found["settings"]["limit"] == 3
    assert found["settings"]["text"] == str(tmp_path / "some.txt")
    assert (found["settings"]["dense"], found["settings"]["device"]) == ("A", "cpu")


def test_markdown_says_the_same_as_the_terminal():
    table, _ = made_up()
    header, aligned, *rows = [line.strip("| ").split(" | ") for line in table.markdown().splitlines()]
    assert header == table.head
    assert len(aligned) == len(header) == len(rows[0])
    assert rows[1][:3] == ["B", "✗", "**12.50**<br><sub>×1.25</sub>"]
    assert rows[3][3] == "<u>60.00</u><br><sub>-20.00</sub><br><sub>±3.00</sub>"
    console = Console(width=100, file=io.StringIO(), force_terminal=True, color_system="standard")
    table.print(console)
    text = console.file.getvalue()
    assert "\x1b[1m12.50\x1b[0m" in text
    assert "\x1b[4m20.00\x1b[0m" in text
    assert "\x1b[2m×1.25\x1b[0m" in text


@needs_harness
def test_a_ruined_model_is_infinitely_perplexed_by_words(place, tmp_path):
    ruined = load_language_model(resolve_model(str(place.model)), "float32")
    with torch.no_grad():
        ruined.model.norm.weight.mul_(1e5)
    ruined.save_pretrained(tmp_path / "ruined")
    tiny_tokenizer().save_pretrained(tmp_path / "ruined")
    options = ["--tasks", "word_perplexity", "--task_data", place.data, "--limit", 1]
    found = measure(place, tmp_path / "ruined", *options)
    assert found["models"][str(tmp_path / "ruined")]["word_perplexity"] == "inf"
