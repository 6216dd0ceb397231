"""Chats: rendered as transformers renders them, answers found as by a slow reading, packed and resumed like text."""

import json
import random
from dataclasses import replace
from functools import cache
from itertools import islice

import datasets
import numpy as np
import pytest
import torch

from helpers.text_files import (
    BOS,
    END,
    LIGHTNING_REMARKS,
    Recorder,
    TinyData,
    byte_tokenizer,
    documents,
    fit,
    write_jsonl,
)
from roi_lightning.data import Corpus, files
from roi_lightning.data.chats import ChatTokenizer, chat_document
from roi_lightning.data.corpora import load_documents
from roi_lightning.data.packing import as_batch
from roi_lightning.errors import UserError
from roi_lightning.models.config import load_tokenizer

pytestmark = LIGHTNING_REMARKS
OPENING = "{% for m in messages %}[{{ m.role }}]"
CLOSING = "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
PLAIN = OPENING + "{{ m.content }};\n" + CLOSING
MARKED = (
    OPENING + "{% if m.role == 'assistant' %}{% generation %}{{ m.content }};{% endgeneration %}"
    "{% else %}{{ m.content }};{% endif %}{{ '\n' }}" + CLOSING
)
TEMPLATES = {"prefixes": PLAIN, "markers": MARKED}


def with_template(template=PLAIN, around="$A"):
    tokenizer = byte_tokenizer(around)
    tokenizer.chat_template = template
    if around != "$A":
        tokenizer.add_special_tokens({"bos_token": "<s>"})
    return tokenizer


class ChatData(TinyData):
    template = PLAIN

    def load_tokenizer(self):
        return with_template(self.template, self.around)


def said(role, content):
    return {"role": role, "content": content}


def make_chats(count, seed=0):
    """Chats of one to three turns, some with a system's message, some that no one has answered."""
    draw = random.Random(seed)
    words = iter(documents(8 * count, seed=seed))
    found = []
    for _ in range(count):
        chat = [said("system", next(words))] if draw.random() < 0.3 else []
        for _ in range(draw.randint(1, 3)):
            chat += [said("user", next(words)), said("assistant", next(words))]
        found.append(chat[:-1] if draw.random() < 0.2 else chat)
    return found


def spelled(chat):
    """The reference: every byte of a chat, and whether the assistant said it."""
    parts = []
    for message in chat:
        answer = message["role"] == "assistant"
        parts += [(f"[{message['role']}]", False), (message["content"] + ";", answer), ("\n", False)]
    return [(token, answer) for text, answer in parts for token in byte_ids(text)]


@cache
def plain_tokenizer():
    return byte_tokenizer()


def byte_ids(text):
    return plain_tokenizer().encode(text, add_special_tokens=False)


def reference_windows(chats, seq_len, opening=()):
    """Slow packing: an end after every chat, whole windows only, those without an answer left out."""
    stream = [pair for one in chats for pair in (*spelled(one), (END, False))]
    length = seq_len - len(opening)
    windows = [stream[i : i + length] for i in range(0, len(stream) - length + 1, length)]
    windows = [[*((token, True) for token in opening), *window] for window in windows]
    return [window for window in windows if any(answer for _, answer in window[1:])]


def split(windows):
    """Input ids and labels of windows of pairs."""
    return (
        [[token for token, _ in window] for window in windows],
        [[token if answer else -100 for token, answer in window] for window in windows],
    )


def chat_data(tmp_path, chats, module=ChatData, streaming=False, loss_on="answers", **options):
    corpus = Corpus(
        write_jsonl(tmp_path / "c.jsonl", chats, "messages"),
        messages_field="messages",
        loss_on=loss_on,
        streaming=streaming,
    )
    held_out = Corpus(
        write_jsonl(tmp_path / "v.jsonl", chats, "messages"), messages_field="messages", loss_on=loss_on
    )
    options = {"seq_len": 32, "cache_dir": str(tmp_path / "cache"), "val_windows": 10_000} | options
    return module(corpora=[corpus], val_corpora=[held_out], **options)


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_chat_is_what_apply_chat_template_makes_of_it_and_an_end(template):
    tokenizer, chats = with_template(TEMPLATES[template]), make_chats(20)
    found = ChatTokenizer(tokenizer, "c", answers_only=False)([chat_document(chat, "c") for chat in chats])
    for chat, ids in zip(chats, found, strict=True):
        assert ids.tolist() == [*tokenizer.apply_chat_template(chat)["input_ids"], END]


@pytest.mark.parametrize("template", TEMPLATES)
def test_answers_are_those_of_a_reading_byte_by_byte(template):
    chats = make_chats(40, seed=1)
    found = ChatTokenizer(with_template(TEMPLATES[template]), "c", answers_only=True)(
        [chat_document(chat, "c") for chat in chats]
    )
    for chat, ids in zip(chats, found, strict=True):
        wanted = [token if answer else ~token for token, answer in (*spelled(chat), (END, False))]
        assert ids.tolist() == wanted


@pytest.mark.parametrize("loss_on", ["all", "answers"])
def test_no_bos_is_doubled_and_no_end(loss_on):
    tokenizer = with_template("<s>" + PLAIN.replace(";\n", "</s>\n"), "<s> $A")
    assert tokenizer.apply_chat_template([said("user", "a")])["input_ids"][0] == BOS
    convert = ChatTokenizer(tokenizer, "c", answers_only=loss_on == "answers")
    (ids,) = convert([chat_document([said("user", "a")], "c")])
    plain = np.where(ids < 0, ~ids, ids).tolist()
    assert plain == [*byte_ids("[user]a"), END, *byte_ids("\n")]


def test_a_template_that_writes_the_date_writes_the_same_every_day():
    tokenizer = with_template("{{ strftime_now('%d %B') }}" + PLAIN)
    (ids,) = ChatTokenizer(tokenizer, "c", answers_only=False)([chat_document([said("user", "a")], "c")])
    assert tokenizer.decode(ids) == "2025-01-01[user]a;\n</s>"


def test_sharegpt_and_empty_fields_are_read_alike():
    ours = [said("system", "s"), said("user", "q"), said("assistant", "a")]
    theirs = [{"from": name, "value": text} for name, text in (("system", "s"), ("human", "q"), ("gpt", "a"))]
    assert chat_document(theirs, "c") == chat_document(ours, "c")
    assert chat_document([message | {"name": None} for message in ours], "c") == chat_document(ours, "c")
    assert chat_document([], "c") is chat_document(None, "c") is None


@pytest.mark.parametrize(
    ("loss_on", "streaming", "bos"),
    [("answers", False, False), ("answers", True, True), ("all", False, True), ("all", True, False)],
)
def test_windows_and_labels_equal_a_slow_packing(tmp_path, bos, streaming, loss_on):
    chats = make_chats(30, seed=2)
    module = chat_data(tmp_path, chats, streaming=streaming, loss_on=loss_on, bos=bos)
    windows = reference_windows(chats, 32, [BOS] if bos else [])
    ids, labels = split(windows)
    batch = as_batch(torch.stack(list(module._held_out)))
    found = module.held_out_labels(len(ids))
    if loss_on == "all":
        assert found is None
        assert list(batch) == ["input_ids"]
        every = [token for chat in chats for token, _ in (*spelled(chat), (END, False))]
        length = 32 - bos
        count = len(every) // length
        assert module.windows("val", count)[:, bos:].flatten().tolist() == every[: count * length]
        return
    assert found.tolist() == labels == batch["labels"].tolist()
    assert module.windows("val", len(ids)).tolist() == ids == batch["input_ids"].tolist()
    if streaming:
        assert module.windows("train", len(ids)).tolist() == ids
    else:
        assert sorted(module.windows("train", len(ids)).tolist()) == sorted(ids)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("kind", ["json", "parquet"])
def test_other_files_hold_chats_too(tmp_path, kind, streaming):
    chats, path = make_chats(5), tmp_path / f"c.{kind}"
    rows = [{"n": i, "talk": chat} for i, chat in enumerate(chats)]
    if kind == "parquet":
        datasets.Dataset.from_list(rows).to_parquet(path)
    else:
        path.write_text(json.dumps(rows))
    corpus = Corpus(str(path), messages_field="talk", streaming=streaming)
    loaded = load_documents(corpus, str(tmp_path / "cache"))
    assert list(loaded.features) == ["text"]
    assert [json.loads(row["text"]) for row in loaded] == chats


class LabelRecorder(Recorder):
    """Writes down labels, too."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.seen[-1] = {name: tensor.tolist() for name, tensor in batch.items()}
        return loss


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_an_interrupted_stream_goes_on_with_the_same_labels(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(files, "_PIECE", 2000)
    module = chat_data(tmp_path, make_chats(80, seed=3), streaming=True)
    if kind == "parquet":
        rows = datasets.Dataset.from_list([{"messages": chat} for chat in make_chats(80, seed=3)])
        rows.to_parquet(tmp_path / "c.parquet", batch_size=30)
        module.corpora = [replace(module.corpora[0], source=str(tmp_path / "c.parquet"))]
    module.setup("fit")
    assert (len(module._substreams) > 1) == (kind == "jsonl")
    substream = module._substreams[-1]
    items = list(islice(substream.windows(), 60))
    assert any((window < 0).any() for window, _ in items)
    for index in range(0, 55, 11):
        torch.save(items[index][1], tmp_path / "state.pt")
        entered = substream.windows(torch.load(tmp_path / "state.pt", weights_only=True))
        wanted = [window.tolist() for window, _ in items[index + 1 : index + 5]]
        assert [window.tolist() for window, _ in islice(entered, 4)] == wanted


@pytest.mark.parametrize("streaming", [False, True])
def test_a_resumed_run_sees_the_batches_and_labels_of_one_without_interruption(tmp_path, streaming):
    def module():
        """Chats whose answers count, in a mixture with text all of which counts."""
        made = chat_data(tmp_path, make_chats(40, seed=4), streaming=streaming, batch_size=2, val_windows=2)
        text = write_jsonl(tmp_path / "t.jsonl", documents(100))
        made.corpora.append(Corpus(text, 0.5, streaming=streaming))
        return made

    whole, _ = fit(module(), tmp_path / "whole", 3, 6, model=LabelRecorder())
    kinds = {len(batch) for batch in whole.seen}
    rows = [row for batch in whole.seen for row in batch.get("labels", batch["input_ids"])]
    assert 2 in kinds
    assert any(-100 in row for row in rows)
    assert any(-100 not in row for row in rows), "windows of text"
    saved = tmp_path / "whole" / "step=3.ckpt"
    resumed, _ = fit(module(), tmp_path / "rest", 3, 6, saved, model=LabelRecorder())
    assert resumed.seen == whole.seen[3:]


def test_a_run_is_told_from_one_with_another_template_or_loss(tmp_path):
    def recipe(template=PLAIN, **options):
        module = chat_data(tmp_path, make_chats(3), **options)
        module.template = template
        return module.recipe()

    assert recipe() == recipe()
    assert recipe(PLAIN + " ")["data.chat_template"] != recipe()["data.chat_template"]
    assert recipe(loss_on="all")["data.corpora"] != recipe()["data.corpora"]
    assert chat_data(tmp_path, make_chats(3)).facts(2)["chats"] == "loss on answers"


def test_a_cache_of_another_template_or_loss_is_not_used(tmp_path):
    chats = make_chats(20, seed=5)
    found = []
    for template, loss_on in ((PLAIN, "all"), (PLAIN, "answers"), (PLAIN.replace(";", "!"), "all")):
        module = chat_data(tmp_path, chats, loss_on=loss_on)
        module.template = template
        found.append(str(torch.stack(list(module._held_out)).tolist()))
    assert len(set(found)) == 3


STRICT = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    + PLAIN[27:]
)
LAST = PLAIN.replace(";", "{% if loop.last %};{% endif %}")
UNASKED = PLAIN.replace("[assistant]", "")
ASKED = [said("user", "q"), said("assistant", "a"), said("user", "r"), said("assistant", "b")]
BAD = {
    "no template": (None, ASKED, "'c' holds chats.*has no chat template"),
    "a role that the template refuses": (
        STRICT,
        [said("tool", "t")],
        "refuses a chat of .*'c'.*tool.*no tools here",
    ),
    "an answer that changes": (LAST, ASKED, "does not show which tokens are answers: answer 2.* changes"),
    "a name and no question": (UNASKED, ASKED, "does not show which tokens are answers"),
    "an answer first": (PLAIN, ASKED[1:], "answer 1 .* comes before any question"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_shows_no_answers_is_refused(case):
    template, chat, message = BAD[case]
    with pytest.raises(UserError, match=message):
        ChatTokenizer(with_template(template), "c", answers_only=True)([chat_document(chat, "c")])


def test_a_template_that_asks_for_nothing_may_have_answers_right_after_questions():
    user = "{% if m.role == 'user' %}[{{ m.content }}] {% else %}{{ m.content }}</s>{% endif %}"
    tokenizer = with_template("{% for m in messages %}" + user + "{% endfor %}")
    (ids,) = ChatTokenizer(tokenizer, "c", answers_only=True)([chat_document(ASKED, "c")])
    assert tokenizer.decode(ids[ids >= 0]) == "a</s>b</s>"


NO_CHATS = [
    "a text",
    {"role": ["user"], "content": ["q"]},
    [said("user", None)],
    [said("user", [{"type": "text", "text": "q"}])],
    [said("assistant", "a") | {"tool_calls": [1]}],
    ["q", "a"],
]


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("chat", NO_CHATS, ids=str)
def test_rows_that_are_no_chats_are_refused(tmp_path, chat, streaming):
    path = write_jsonl(tmp_path / "c.jsonl", [chat] * 3, "messages")
    corpus = Corpus(path, messages_field="messages", streaming=streaming)
    with pytest.raises(UserError, match=r"c\.jsonl' has a row that is no chat.*role and content"):
        list(load_documents(corpus, str(tmp_path / "cache")))


def test_half_a_character_is_replaced():
    assert json.loads(chat_document([said("user", "a \ud83d")], "c")) == [said("user", "a \ufffd")]


@pytest.mark.slow
def test_the_answers_of_a_real_template_stand_where_a_reader_sees_them():
    tokenizer = load_tokenizer("smollm2-135m")
    chats = [[said(m["role"], m["content"] + " 🙂 naïve") for m in chat] for chat in make_chats(30, seed=6)]
    for chat in chats:
        (ids,) = ChatTokenizer(tokenizer, "c", answers_only=True)([chat_document(chat, "c")])
        assert np.where(ids < 0, ~ids, ids).tolist() == tokenizer.apply_chat_template(chat)["input_ids"]
        answers = [m["content"] + "<|im_end|>" for m in chat if m["role"] == "assistant"]
        assert tokenizer.decode(ids[ids >= 0]) == "".join(answers)
