"""Other tasks of lm-evaluation-harness: examples, chats, groups, answers that are written; against its own code."""

import json
from pathlib import Path

import lm_eval.tasks
import pytest
import yaml
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager
from test_harness import _no_environment, arc, by_hand, huggingface, write_rows  # noqa: F401

from helpers.lab import run
from helpers.tiny_models import tiny_llama, tiny_tokenizer
from roi_lightning.errors import UserError
from roi_lightning.evaluation import harness
from roi_lightning.evaluation.config import EvalConfig
from roi_lightning.evaluation.evaluated_models import resolve_evaluated
from roi_lightning.evaluation.harness import figures_of, open_tasks, run_tasks
from roi_lightning.evaluation.run import evaluate_models
from roi_lightning.models.config import load_tokenizer
from roi_lightning.models.loading import load_language_model
from roi_lightning.models.source import resolve_model

STOCK = Path(lm_eval.tasks.__file__).parent
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
FACTS = [
    ("Which colour has snow?", "white"),
    ("Which colour has coal?", "black"),
    ("Which colour has grass?", "green"),
    ("Which colour has the clear sky at noon?", "blue"),
    ("How many legs has a spider?", "eight"),
    ("How many wheels has a bicycle?", "two"),
    ("What do bees make?", "honey"),
    ("What do cows give?", "milk"),
]
EXAMPLES = [("Which colour has a ripe lemon?", "yellow"), ("How many hands have you?", "two")]
WRITTEN = {
    "task": "facts",
    "dataset_path": "json",
    "test_split": "test",
    "fewshot_split": "train",
    "output_type": "generate_until",
    "doc_to_text": "{{question}}",
    "doc_to_target": "{{answer}}",
    "generation_kwargs": {"until": ["\n"], "max_gen_toks": 12, "do_sample": False},
    "filter_list": [
        {"name": "whole", "filter": [{"function": "take_first"}]},
        {
            "name": "first-word",
            "filter": [{"function": "regex", "regex_pattern": "([a-zA-Z]+)"}, {"function": "take_first"}],
        },
    ],
    "metric_list": [
        {"metric": "exact_match", "aggregation": "mean", "higher_is_better": True, "ignore_case": True}
    ],
    "metadata": {"version": 3},
}
CHOICE = {
    "dataset_path": "json",
    "test_split": "test",
    "output_type": "multiple_choice",
    "doc_to_text": "{{question}}",
    "doc_to_target": "{{answer}}",
    "doc_to_choice": ["white", "black", "two", "milk"],
    "metric_list": [
        {"metric": metric, "aggregation": "mean", "higher_is_better": True} for metric in ("acc", "acc_norm")
    ],
}


def write_pairs(folder, name, pairs):
    write_rows(folder, name, [{"question": q, "answer": a} for q, a in pairs])
    return str(folder / f"{name}.jsonl")


def write_task(file, content, **files):
    more = {"dataset_kwargs": {"data_files": files}} if files else {}
    file.write_text(yaml.safe_dump(content | more))
    return str(file)


class Place:
    """Definitions with files of their own."""

    def __init__(self, folder):
        self.folder = folder
        test, train = write_pairs(folder, "a", FACTS), write_pairs(folder, "b", EXAMPLES)
        self.facts = write_task(folder / "facts.yaml", WRITTEN, test=test, train=train)
        rows = [(q, a) for q, a in FACTS if a in CHOICE["doc_to_choice"]]
        for name, part in (("one", rows[:1] * 3 + rows[1:2]), ("other", rows[1:])):
            file = write_pairs(folder, f"choice_{name}", part)
            write_task(folder / f"choice_{name}.yaml", CHOICE | {"task": f"choice_{name}"}, test=file)
        group = {"group": "choices", "task": ["choice_one", "choice_other"], "metadata": {"version": 1}}
        figures = {"aggregate_metric_list": [{"metric": "acc", "weight_by_size": True}]}
        write_task(folder / "choices.yaml", group | figures)
        write_task(folder / "bag.yaml", group | {"group": "bag"})


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return Place(tmp_path_factory.mktemp("tasks"))


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tiny_llama(tmp_path_factory.mktemp("lm"), max_position_embeddings=1024)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def lm(base):
    return load_language_model(resolve_model(base), "float32")


@pytest.fixture(scope="module")
def known(place):
    """A short list instead of the harness' own, which takes seconds to read."""
    folders = [place.folder, STOCK / "gsm8k", STOCK / "arc", STOCK / "humaneval"]
    return TaskManager(include_path=[str(folder) for folder in folders], include_defaults=False)


@pytest.fixture(autouse=True)
def _short_list(monkeypatch, known):
    monkeypatch.setattr(harness, "_task_manager", lambda whole: known)


def ours(lm, base, name, **options):
    config = EvalConfig(tasks=name, batch_size=3, **options)
    opened = open_tasks([name], config.task_data, config.num_fewshot)
    return figures_of(run_tasks(opened, lm, load_tokenizer(base), config))


def theirs(lm, base, manager, names, **options):
    """The harness' own function, whose arguments are those of its program."""
    model = huggingface.HFLM(lm, tokenizer=load_tokenizer(base), batch_size=3, softmax_dtype="float32")
    options = {"fewshot_as_multiturn": options.get("apply_chat_template", False)} | options
    return simple_evaluate(model, tasks=names, task_manager=manager, log_samples=False, **options)["results"]


def numbers(metrics):
    return {key.removesuffix(",none"): x for key, x in metrics.items() if "," in key and x != "N/A"}


def without_counts(figures):
    return {key: x for key, x in figures.items() if key != "samples"}


@pytest.mark.parametrize(
    "options",
    [
        {"num_fewshot": 2},
        {"apply_chat_template": True, "system_instruction": "Be brief."},
        {"apply_chat_template": True, "num_fewshot": 1, "limit": 0.25},
    ],
)
def test_written_answers_are_the_harness_own(lm, base, place, known, options):
    wanted = theirs(lm, base, known, ["facts"], **options)["facts"]
    figures = ours(lm, base, place.facts, **options)["facts"]
    assert without_counts(figures) == pytest.approx(numbers(wanted))
    assert set(figures) == {
        *(f"exact_match{e},{f}" for e in ("", "_stderr") for f in ("whole", "first-word")),
        "samples",
    }
    assert figures["samples"] == (2 if "limit" in options else 8)


ARC = [arc(f"{q}?", "A", A=right, B="none") for q, right in (*FACTS, *EXAMPLES)]


def test_examples_come_from_the_training_file_as_the_harness_draws_them(lm, base, tmp_path):
    write_rows(tmp_path, "arc_easy", ARC[:3])
    write_rows(tmp_path, "arc_easy.train", ARC[3:])
    files = {"test": tmp_path / "arc_easy.jsonl", "train": tmp_path / "arc_easy.train.jsonl"}
    manager = by_hand(tmp_path, "arc_easy", **files)
    wanted, found = {}, {}
    for shots in (0, 3):
        wanted[shots] = numbers(theirs(lm, base, manager, ["by_hand"], num_fewshot=shots)["by_hand"])
        found[shots] = ours(lm, base, "arc_easy", task_data=tmp_path, num_fewshot=shots)["arc_easy"]
        assert without_counts(found[shots]) == pytest.approx(wanted[shots])
    again = ours(lm, base, "arc_easy", task_data=tmp_path, num_fewshot=3)["arc_easy"]
    assert again == found[3], "every model is shown the same examples"


def test_a_task_group_has_a_figure_and_those_of_its_members(lm, base, known):
    wanted = theirs(lm, base, known, ["choices"])
    figures = ours(lm, base, "choices")
    assert list(figures) == list(wanted)
    for name, metrics in figures.items():
        assert without_counts(metrics) == pytest.approx(numbers(wanted[name]))


def test_a_tasks_own_number_of_examples_holds_unless_another_is_asked_for(place, tmp_path):
    rows = [{"question": q, "answer": f"Well. #### {i}"} for i, (q, _) in enumerate(FACTS)]
    for name in ("gsm8k", "gsm8k.train"):
        write_rows(tmp_path, name, rows)
    for asked, shots in ((None, 5), (0, 0), (2, 2)):
        assert open_tasks(["gsm8k"], tmp_path, asked)["tasks"]["gsm8k"].config.num_fewshot == shots
    (tmp_path / "gsm8k.train.jsonl").unlink()
    with pytest.raises(UserError, match=r"gsm8k\.train\.jsonl.*--num_fewshot 0"):
        open_tasks(["gsm8k"], tmp_path, None)
    fixed = CHOICE | {"task": "fixed", "num_fewshot": 0}
    file = write_task(tmp_path / "fixed.yaml", fixed, test=str(place.folder / "choice_one.jsonl"))
    assert open_tasks([file], None, 5)["tasks"]["fixed"].config.num_fewshot == 0, "as in the harness"


def test_models_that_can_t_answer_are_refused(place, tmp_path):
    plain, bare = (tiny_llama(tmp_path / name) for name in ("plain", "bare"))
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = None
    tokenizer.save_pretrained(bare)
    refused = {plain: (True, "no chat template"), bare: (False, "bare': its tokenizer has no EOS")}
    for model, (chat, says) in refused.items():
        with pytest.raises(UserError, match=says):
            evaluate_models(
                resolve_evaluated([str(model)], None),
                EvalConfig(tasks=place.facts, apply_chat_template=chat),
                lambda _: pytest.fail("loaded"),
            )


def test_the_command_writes_it_all_down(place, base, tmp_path):
    out, page = tmp_path / "o.json", tmp_path / "o.md"
    arguments = ["--tasks", f"{place.facts},choices", "--apply_chat_template", "--num_fewshot", 1]
    arguments += ["--limit", 0.5, "--json", out, "--markdown", page, "--dtype", "float32"]
    assert run("evaluate", base, *arguments) == 0
    found = json.loads(out.read_text())
    figures, settings = found["models"][base], found["settings"]
    assert set(figures) == {"facts", "choices", "choice_one", "choice_other"}
    assert figures["facts"]["samples"] == 4
    assert settings["harness"]["facts"] == {"num_fewshot": 1, "version": 3}
    assert (settings["limit"], settings["num_fewshot"], settings["apply_chat_template"]) == (0.5, 1, True)
    (head,) = [line for line in page.read_text().splitlines() if line.startswith("| model")]
    assert head.strip("| ").split(" | ")[2:] == [
        "facts exact_match,whole ↑",
        "facts exact_match,first-word ↑",
        "choices acc ↑",
    ]
