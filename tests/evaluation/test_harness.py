"""The scorer and the tasks against lm-evaluation-harness' own code."""

import glob
import json
import random
import socket
from pathlib import Path

import pytest
import torch
import yaml

from helpers.fake_hub import Repository, fake_hub, reach
from helpers.tiny_models import VOCAB_SIZE, tiny_llama, tiny_qwen2, tiny_tokenizer
from roi_lightning.errors import UserError
from roi_lightning.evaluation.config import EvalConfig
from roi_lightning.evaluation.harness import figures_of, open_tasks, run_tasks
from roi_lightning.models.loading import load_language_model
from roi_lightning.models.source import resolve_model

huggingface = pytest.importorskip("lm_eval.models.huggingface")
import lm_eval.evaluator  # noqa: E402
import lm_eval.tasks  # noqa: E402
from lm_eval import simple_evaluate  # noqa: E402
from lm_eval.api.instance import Instance  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

from roi_lightning.evaluation.harness_model import SlicedHFLM  # noqa: E402

WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]


def arc(question, right, **answers):
    choices = {"text": list(answers.values()), "label": list(answers)}
    return {"question": question, "choices": choices, "answerKey": right}


QUESTIONS = {
    "arc_easy": [
        arc("Which is a fruit?", "B", A="a stone", B="an apple", C="tin"),
        arc("What is wet?", "1", **{"1": "water", "2": "sand"}),
        arc("2 + 2?", "A", A="4", B="fiver"),
    ],
    "boolq": [
        {"passage": "Grass is green.", "question": "is grass green", "label": 1},
        {"passage": "Snow is white.", "question": "is snow red", "label": 0},
        {"passage": "Coal is black.", "question": "is coal black", "label": 1},
    ],
    "hellaswag": [
        {
            "activity_label": "Cooking",
            "ctx_a": "A man cuts bread.",
            "ctx_b": "he",
            "endings": ["eats it.", "flies off [title] up.", "melts.", "is bread."],
            "label": "0",
        }
    ],
    "race": [
        {
            "article": "A dog sat.",
            "problems": repr(
                [
                    {"question": "Who sat?", "answer": "A", "options": ["dog", "cat", "cow", "hen"]},
                    {"question": "It  _  .", "answer": "B", "options": ["ran", "sat", "hid", "dug"]},
                ]
            ),
        }
    ],
}


def write_rows(folder, name, rows):
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("questions [v2]")
    for name, rows in QUESTIONS.items():
        write_rows(folder, name, rows)
    words = random.Random(0)
    pages = [" ".join(words.choices(WORDS, k=size)) for size in (3, 90, 20, 55)]
    write_rows(folder, "wikitext", [{"page": f" = {page} = \n {page} , {page} 's . \n"} for page in pages])
    return folder


@pytest.fixture(scope="module", params=[tiny_llama, pytest.param(tiny_qwen2, marks=pytest.mark.slow)])
def lm(request, tmp_path_factory):
    folder = request.param(tmp_path_factory.mktemp("lm"))
    return load_language_model(resolve_model(str(folder)), "float32")


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch):
    """The harness' own function asks pip for every package, which takes seconds."""
    monkeypatch.setattr(lm_eval.evaluator, "add_env_info", lambda _: None)


def stock(lm, max_length=None, **options):
    options = {"batch_size": 3, "softmax_dtype": "float32", "max_length": max_length} | options
    return huggingface.HFLM(lm, tokenizer=tiny_tokenizer(), **options)


def ours(lm, max_length=None, batch_size=3):
    return SlicedHFLM(lm, tiny_tokenizer(), max_length, batch_size, "test")


def requests(seed):
    """Contexts and continuations of all lengths, some shared, some longer together than the model reads."""
    numbers = random.Random(seed)

    def tokens(count):
        return numbers.choices(range(VOCAB_SIZE), k=count)

    made = []
    for context, continuation in [(1, 1), (5, 3), (40, 20), (127, 1), (128, 1), (200, 9), (90, 60), (3, 128)]:
        start, end = tokens(context), tokens(continuation)
        made += [(("", ""), start, end), (("", ""), start, tokens(continuation))]
        made += [(("", ""), start, [*end[:-1], *tokens(1)])]  # the same input, another last token
    numbers.shuffle(made)
    return made


def assert_same(found, wanted):
    assert [greedy for _, greedy in found] == [greedy for _, greedy in wanted]
    torch.testing.assert_close(
        torch.tensor([lp for lp, _ in found]), torch.tensor([lp for lp, _ in wanted]), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("batch_size", [1, 4, 100])
def test_the_scorer_agrees_with_the_stock_one_in_any_order(lm, batch_size):
    asked = requests(batch_size)
    wanted = stock(lm)._loglikelihood_tokens(asked, disable_tqdm=True)
    assert_same(ours(lm, batch_size=batch_size)._loglikelihood_tokens(asked), wanted)
    assert_same(ours(lm)._loglikelihood_tokens(asked[::-1]), wanted[::-1])


def test_greedy_continuations_are_recognised(lm):
    numbers = torch.Generator().manual_seed(0)
    asked = []
    for length in (4, 9, 30):
        context = torch.randint(VOCAB_SIZE, (1, length), generator=numbers)
        most = lm.generate(context, max_new_tokens=3, do_sample=False, eos_token_id=None)[0, length:].tolist()
        asked += [(None, context[0].tolist(), most), (None, context[0].tolist(), [*most[:2], 0])]
    wanted = stock(lm)._loglikelihood_tokens(asked, disable_tqdm=True)
    assert [greedy for _, greedy in wanted[::2]] == [True] * 3
    assert_same(ours(lm)._loglikelihood_tokens(asked), wanted)


@pytest.mark.parametrize("request_", [([1], [2] * 129), ([], [1]), ([1], [])])
def test_what_can_t_be_scored_is_one_clear_line(lm, request_):
    with pytest.raises(UserError, match="can't score"):
        ours(lm)._loglikelihood_tokens([(None, *request_)])


def test_a_question_with_a_token_that_has_no_embedding_is_one_clear_line(lm):
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens([f"<x{i}>" for i in range(10)])
    with pytest.raises(UserError, match=r"token '<x9>', number 267: .* embeds 264"):
        SlicedHFLM(lm, tokenizer, None, 3, "test").loglikelihood(
            [Instance("loglikelihood", {}, ("a <x9>?", "b"), 0)]
        )


@pytest.mark.parametrize("max_length", [None, 50])
def test_rolling_texts_agree_with_the_stock_model(lm, max_length):
    texts = ["short", "x" * 128, "many words " * 40, "y " * 77]
    asked = [Instance("loglikelihood_rolling", {}, (text,), 0) for text in texts]
    # Its cache takes the wrong positions where windows have the same input and score unlike parts of it.
    wanted = stock(lm, max_length, logits_cache=False).loglikelihood_rolling(asked, disable_tqdm=True)
    assert ours(lm, max_length).loglikelihood_rolling(asked) == pytest.approx(wanted, rel=1e-5)


def test_requests_with_the_same_input_share_a_forward_pass(lm):
    passes = []
    handle = lm.model.embed_tokens.register_forward_hook(lambda _m, ids, _o: passes.append(ids[0].shape))
    ours(lm, batch_size=8)._loglikelihood_tokens([(None, [1, 2, 3], [answer]) for answer in (4, 5, 6)])
    handle.remove()
    assert passes == [(1, 3)]


def measured(lm, data, name, max_length=None, **options):
    config = EvalConfig(tasks=name, task_data=data, batch_size=3, **options)
    tasks = open_tasks([name], data, config.num_fewshot)
    return figures_of(run_tasks(tasks, lm, tiny_tokenizer(), config, max_length=max_length))[name]


DEFINED = {"arc_easy": "arc/arc_easy", "boolq": "super_glue/boolq/default"}


def by_hand(folder, name, **files):
    """A stock task on local files, one for each split, as the task `by_hand`."""
    stock = Path(lm_eval.tasks.__file__).parent / DEFINED.get(name, f"{name}/{name}")
    task = {"include": f"{stock}.yaml", "task": "by_hand", "tag": None}
    task |= {"dataset_path": "json", "dataset_name": None}
    files = {split: glob.escape(str(file)) for split, file in files.items()}
    task |= {"dataset_kwargs": {"data_files": files}}
    splits = {"training_split": "train", "validation_split": "validation", "test_split": "test"}
    task |= {key: split if split in files else None for key, split in splits.items()}
    (folder / "by_hand.yaml").write_text(yaml.safe_dump(task))
    return TaskManager(include_path=str(folder), include_defaults=False)


def by_the_harness(lm, data, name, folder, limit=None, max_length=None):
    """The documented way: a definition that includes the stock one, and `simple_evaluate`."""
    split = "validation" if name in ("boolq", "hellaswag") else "test"
    manager = by_hand(folder, name, **{split: data / f"{name}.jsonl"})
    found = simple_evaluate(
        stock(lm, max_length), tasks=["by_hand"], task_manager=manager, limit=limit, bootstrap_iters=10
    )
    return found["results"]["by_hand"], found["n-samples"]["by_hand"]["effective"]


@pytest.mark.parametrize("name", QUESTIONS)
def test_every_task_gives_the_harness_own_metrics(lm, data, tmp_path, name):
    wanted, count = by_the_harness(lm, data, name, tmp_path)
    figures = measured(lm, data, name)
    assert figures["samples"] == count == len(QUESTIONS[name])
    assert figures["acc"] == wanted["acc,none"]
    assert figures.get("acc_norm") == wanted.get("acc_norm,none")
    assert ("acc_norm" in figures) == (name not in ("boolq", "race"))
    if count > 1:
        assert figures["acc_stderr"] == pytest.approx(wanted["acc_stderr,none"])
    else:
        assert "acc_stderr" not in figures, "one question has no standard error"


@pytest.mark.parametrize(("limit", "max_length"), [(None, None), (2, None), (None, 40)])
def test_word_perplexity_is_the_harness_own(lm, data, tmp_path, limit, max_length):
    wanted, _ = by_the_harness(lm, data, "wikitext", tmp_path, limit, max_length)
    found = measured(lm, data, "wikitext", max_length, limit=limit)["word_perplexity"]
    assert found == pytest.approx(wanted["word_perplexity,none"], rel=1e-5)


def test_local_files_need_no_network(data, monkeypatch):
    import datasets
    import huggingface_hub

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    tried = []
    monkeypatch.setattr(socket.socket, "connect", lambda _self, address: tried.append(address))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *address, **_: tried.append(address))
    assert len(open_tasks(["boolq", "hellaswag", "wikitext"], data, None)["tasks"]) == 3
    assert not tried


def test_questions_come_from_the_hub(lm, data, tmp_path, monkeypatch):
    splits = [{"split": name, "path": f"{name}.jsonl"} for name in ("train", "validation", "test")]
    card = yaml.safe_dump({"configs": [{"config_name": "ARC-Easy", "data_files": splits}]})
    rows = dict.fromkeys([split["path"] for split in splits], (data / "arc_easy.jsonl").read_bytes())
    with fake_hub() as hub:
        reach(monkeypatch, hub, tmp_path / "hub")
        hub.holds["datasets/allenai/ai2_arc"] = Repository(
            {"1" * 40: rows | {"README.md": f"---\n{card}---\n".encode()}}
        )
        assert measured(lm, None, "arc_easy") == measured(lm, data, "arc_easy")


def test_data_of_another_form_is_one_line(tmp_path):
    for content in ('{"text": "no question"}\n', "{broken"):
        (tmp_path / "boolq.jsonl").write_text(content)
        with pytest.raises(UserError, match=r"--tasks boolq: .*fields of the files in --task_data") as caught:
            open_tasks(["boolq"], tmp_path, None)
        assert "\n" not in str(caught.value)
