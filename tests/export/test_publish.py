"""What goes to the hub: complete, true, without a word about the machine it was made on."""

import json
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest
import torch
import yaml
from huggingface_hub import ModelCard
from markdown_it import MarkdownIt
from safetensors.torch import load_file

from cli_helpers import Lab, run
from fake_hub import fake_hub, reach
from roi_lightning.data.corpora import FORMATS
from roi_lightning.data.files import OPENERS
from roi_lightning.errors import UserError
from roi_lightning.export import verify_export, write_export
from roi_lightning.export.card_metadata import public_name, public_values
from roi_lightning.export.publishing.hub import base_card, licence_fields
from roi_lightning.export.publishing.provenance import read_config, read_measured
from roi_lightning.export.sidecar import command_line, read_sidecar
from roi_lightning.masks.mask_set import MaskSet
from roi_lightning.models.source import resolve_model
from tiny_models import random_masks, tiny_gguf

README = "---\nlicense: other\nlicense_name: tiny\nlicense_link: LICENSE\nlanguage: en\n---\n# Tiny\n"


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """A lab whose model has a licence, in the files of a run of `fit`, of `prune`, and of `evaluate`."""
    folder = tmp_path_factory.mktemp("publish")
    lab = Lab(folder, folder / "shared")
    (lab.model / "README.md").write_text(README)
    (lab.model / "LICENSE").write_text("Do as you like.\n")
    source = resolve_model(str(lab.model))
    training = {"learner": "RoILightningModule", "method": "roi", "steps": 4}
    training |= {"text": f"{lab.corpus}, owner/text", "seq_len": 32, "tokens": 1024}
    write_export(source, random_masks(source), folder / "run" / "export", training=training)
    config = {
        "model": {
            "init_args": {"lm": str(lab.model), "pattern": "2:4", "prior": str(folder / "mask.safetensors")}
        },
        "data": {"corpora": [str(lab.corpus), {"source": "owner/text"}]},
        "trainer": {"default_root_dir": str(folder / "run"), "max_steps": 4},
    }
    (folder / "run" / "config.yaml").write_text(yaml.safe_dump(config))
    (folder / "text.txt").write_text("The cat saw two dogs run far from home. " * 20)
    models = (lab.model, folder / "run" / "export")
    options = ("--text", folder / "text.txt", "--seq_len", "48", "--device", "cpu")
    assert run("evaluate", *models, *options, "--json", folder / "evaluation.json") == 0
    text = ("--corpora", lab.corpus, "--windows", "3", "--seq_len", "32", "--device", "cpu")
    only = ("--mask_only", "--targets", "q_proj", "down_proj", "--out", folder / "pruned")
    words = [*map(str, ("prune", lab.model, "--method", "sparsegpt", *text, *only))]
    with pytest.MonkeyPatch.context() as process:
        process.setattr(sys, "argv", ["/usr/bin/roi-lightning", *words])
        assert run(*words) == 0
    return lab


@pytest.fixture(scope="module")
def export(lab):
    return lab.folder / "run" / "export"


@pytest.fixture
def golden_export():
    """Of an earlier version."""
    return Path(__file__).parents[1] / "golden" / "export"


@pytest.fixture(scope="module")
def published(lab, export):
    options = ("--evaluation", lab.folder / "evaluation.json", "--out", lab.folder / "published")
    assert run("publish", export, "--name", "me/tiny", *options) == 0
    return lab.folder / "published"


def rendered(directory):
    """The tokens of a card as Markdown, and it as HTML."""
    text = ModelCard.load(directory / "README.md").text
    markdown = MarkdownIt("commonmark", {"html": True}).enable("table")
    return markdown.parse(text), markdown.render(text)


def blocks(directory, language):
    """The code of a card in one language."""
    return [
        token.content for token in rendered(directory)[0] if token.type == "fence" and token.info == language
    ]


def cells(html):
    """Every table as rows of cells."""
    tables = re.findall(r"<table>(.*?)</table>", html, re.DOTALL)
    rows = [re.findall(r"<tr>(.*?)</tr>", table, re.DOTALL) for table in tables]
    return [[re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row, re.DOTALL) for row in table] for table in rows]


def test_a_published_directory_is_the_export_under_another_name(lab, export, published):
    assert verify_export(published, resolve_model(str(lab.model))).ok
    mine, theirs = ({path.name for path in folder.iterdir()} for folder in (published, export))
    assert mine == theirs | {".gitattributes"}
    for name in theirs - {"README.md", "roi_sparsity.json", "roi_mask.safetensors"}:
        assert (published / name).read_bytes() == (export / name).read_bytes()
    ours, others = MaskSet.load(published), MaskSet.load(export)
    assert all(torch.equal(ours.layers[name].packed, x.packed) for name, x in others.layers.items())
    assert run("apply", lab.model, published, "--out", lab.folder / "again") == 0
    again = load_file(lab.folder / "again" / "model.safetensors")
    assert all(torch.equal(x, again[name]) for name, x in load_file(published / "model.safetensors").items())


def test_no_file_names_a_folder(lab, export, published):
    assert any(str(lab.folder).encode() in path.read_bytes() for path in export.iterdir())
    for path in published.iterdir():
        assert str(lab.folder).encode() not in path.read_bytes(), path.name
        assert str(Path.home()).encode() + b"/" not in path.read_bytes(), path.name


def test_a_download_still_verifies(published, tmp_path):
    copy = Path(shutil.copytree(published, tmp_path / "copy"))
    (copy / ".cache" / "huggingface").mkdir(parents=True)
    (copy / ".cache" / "huggingface" / "notes").write_text("downloaded")
    assert verify_export(copy).ok
    (copy / ".cache" / "other").write_text("not the hub's")
    assert [check.name for check in verify_export(copy).failures] == ["files"]


def test_the_front_matter_says_what_the_hub_asks(lab, published):
    data = ModelCard.load(published / "README.md").data.to_dict()
    assert (data["license"], data["license_name"], data["license_link"]) == ("other", "tiny", "LICENSE")
    assert (data["language"], data["datasets"]) == (["en"], ["owner/text"])
    assert (data["library_name"], data["pipeline_tag"]) == ("transformers", "text-generation")
    assert {"sparsity", "pruning", "2:4", "semi-structured", "n-m-sparsity", "roi-lightning"} == set(
        data["tags"]
    )
    assert "base_model" not in data, "a local directory is no hub id"
    told = json.loads((lab.folder / "evaluation.json").read_text())["models"]
    (entry,) = data["model-index"]
    (result,) = entry["results"]
    (metric,) = result["metrics"]
    assert entry["name"] == "tiny"
    assert result["dataset"]["name"] == "text.txt"
    export = str(lab.folder / "run" / "export")
    assert (metric["type"], metric["value"]) == ("perplexity", told[export]["token_perplexity"])


def test_the_card_s_tables_hold_what_evaluate_wrote(lab, published):
    html = rendered(published)[1]
    tables = {table[0][0]: table[1:] for table in cells(html)}
    told = json.loads((lab.folder / "evaluation.json").read_text())["models"]
    mine, dense = told[str(lab.folder / "run" / "export")], told[str(lab.model)]
    metrics = ["token_perplexity", str(mine["token_perplexity"]), str(dense["token_perplexity"])]
    assert tables["metric"] == [metrics]
    kinds = {row[0]: row[1:] for row in tables["kind of layer"]}
    assert kinds["<code>down_proj</code>"] == ["2", "16,384", "50.0%"]
    assert len(cells(html)) == html.count("<table>") == 4
    assert "|" not in re.sub(r"<pre>.*?</pre>", "", html, flags=re.DOTALL)
    assert "<details>" in html
    assert "1,024 tokens" in html


def test_a_setting_that_each_model_has_its_own_of_is_that_of_the_model(tmp_path):
    settings = {"dense": None, "text": None, "word_length": {"a": 1024, "b": 4096}, "bos": None}
    models = {name: {"word_perplexity": 9.0} for name in "ab"}
    (tmp_path / "e.json").write_text(json.dumps({"models": models, "settings": settings}))
    found = read_measured(tmp_path / "e.json", tmp_path, "b").settings
    assert found == {"text": None, "word_length": 4096, "bos": None}


def test_a_task_group_is_one_metric_and_its_members_stay_in_the_evaluation(tmp_path):
    figures = {"mmlu": {"acc": 0.5, "samples": 9, "subtasks": {"mmlu_law": {"acc": 0.25}}}}
    settings = {"dense": None, "text": None, "harness": {"mmlu_law": {"num_fewshot": 5, "version": 1}}}
    (tmp_path / "e.json").write_text(json.dumps({"models": {"a": figures}, "settings": settings}))
    found = read_measured(tmp_path / "e.json", tmp_path, "a")
    assert found.metrics == {"mmlu.acc": 0.5, "mmlu.samples": 9}
    assert found.settings == {"text": None}


def test_the_configuration_is_in_the_card_without_folders(lab, published):
    config = yaml.safe_load(blocks(published, "yaml")[0])
    assert config["model"]["init_args"] == {"lm": "model", "pattern": "2:4", "prior": "mask.safetensors"}
    assert config["data"] == {"corpora": ["corpus.jsonl", {"source": "owner/text"}]}


def test_the_snippet_runs_as_pasted(published, capsys):
    (snippet,) = blocks(published, "python")
    assert '"me/tiny"' in snippet
    exec(snippet.replace("me/tiny", str(published)), {})
    assert capsys.readouterr().out.startswith("The capital of France is")


def test_the_command_in_the_card_makes_the_same_directory(lab, tmp_path):
    options = ("--base", "owner/base", "--out", tmp_path / "out")
    assert (
        run("publish", lab.folder / "pruned", "--name", "me/tiny", *options, "--dataset", "owner/text") == 0
    )
    card = ModelCard.load(tmp_path / "out" / "README.md")
    assert (card.data.base_model, card.data.to_dict()["base_model_relation"]) == ("owner/base", "finetune")
    assert card.data.datasets == ["owner/text"]
    assert MaskSet.load(tmp_path / "out").base.spec == "owner/base"
    command = next(text for text in blocks(tmp_path / "out", "") if " prune " in text)
    words = {"model": lab.model, "corpus.jsonl": lab.corpus, "pruned": tmp_path / "again"}
    arguments = [words.get(word, word) for word in shlex.split(command)]
    assert arguments[:3] == ["python", "-m", "roi_lightning"]
    assert run(*arguments[3:]) == 0
    for name in ("model.safetensors", "roi_mask.safetensors"):
        assert (tmp_path / "again" / name).read_bytes() == (lab.folder / "pruned" / name).read_bytes()


def test_an_export_that_does_not_tell_its_command_is_published_without(golden_export, tmp_path):
    assert "command" not in read_sidecar(golden_export)
    options = ("--name", "me/tiny", "--license", "mit", "--out", tmp_path / "out")
    assert run("publish", golden_export, *options) == 0
    assert "The command" not in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.parametrize(
    ("argv", "recorded"),
    [
        (["/x/bin/roi-lightning", "fit", "-c", "a.yaml"], ["fit", "-c", "a.yaml"]),
        (["/x/roi_lightning/__main__.py", "fit"], ["fit"]),
        (["/x/other/__main__.py", "fit"], None),
        (["/x/bin/pytest", "fit"], None),
        (["roi-lightning", "--a.api_key", "abc", "--b"], ["--a.api_key", "REDACTED", "--b"]),
        (["roi-lightning", "--a.b_token=abc"], ["--a.b_token=REDACTED"]),
        (["roi-lightning", '{"api_key": "abc", "b": 1}'], ['{"api_key": REDACTED, "b": 1}']),
        (["roi-lightning", "--targets", "attn_key", "attn_value"], ["--targets", "attn_key", "attn_value"]),
        (["roi-lightning", "hf_" + "x" * 34], ["REDACTED"]),
        (["roi-lightning", "--data.tokenizer", "owner/name"], ["--data.tokenizer", "owner/name"]),
    ],
)
def test_the_command_is_recorded_without_secrets(argv, recorded, monkeypatch):
    monkeypatch.setattr(sys, "argv", argv)
    assert command_line() == recorded


def test_every_kind_of_text_file_is_taken_for_a_path():
    for suffix in (*FORMATS, *OPENERS):
        assert public_name(f"folder/text{suffix}") == f"text{suffix}"


def test_names_of_others_stay_and_folders_go():
    assert public_name("/home/me/texts/*.txt, owner/name") == "*.txt, owner/name"
    assert public_name("gguf:../m.gguf") == "m.gguf"
    assert (
        public_name("{source: ~/notes.jsonl.gz, text_field: body}")
        == "{source: notes.jsonl.gz, text_field: body}"
    )
    assert public_name("/home/me/my texts/a.txt") == "a.txt"
    logger = {"logger": [{"api_key": "abc", "name": "x"}], "tokenizer": "owner/name"}
    hidden = {"logger": [{"api_key": "REDACTED", "name": "x"}], "tokenizer": "owner/name"}
    assert public_values(logger) == hidden
    assert public_values({"a": ["x/y.txt", 3, None], "b": "https://example.org/x"}) == {
        "a": ["y.txt", 3, None],
        "b": "https://example.org/x",
    }


@pytest.mark.parametrize(
    ("readme", "licence", "given", "expected"),
    [
        ("---\nlicense: mit\n---\n", None, None, {"license": "mit"}),
        ("---\nlicense: mit\n---\n", "Mine.", "apache-2.0", {"license": "apache-2.0"}),
        (None, None, "gpl-3.0", {"license": "gpl-3.0"}),
        (
            "no front matter",
            "Mine.",
            None,
            {"license": "other", "license_name": "license-of-the-base-model", "license_link": "LICENSE"},
        ),
    ],
)
def test_the_licence_is_the_base_s_or_given(tmp_path, readme, licence, given, expected):
    for name, text in (("config.json", "{}"), ("README.md", readme), ("LICENSE", licence)):
        if text is not None:
            (tmp_path / name).write_text(text)
    assert licence_fields(given, base_card(str(tmp_path), None, None), tmp_path) == expected


def test_without_a_licence_nothing_is_written(lab, tmp_path, capsys):
    base = Path(shutil.copytree(lab.model, tmp_path / "base"))
    (base / "README.md").unlink()
    (base / "LICENSE").unlink()
    source = resolve_model(str(base))
    write_export(source, random_masks(source), tmp_path / "export")
    assert run("publish", tmp_path / "export", "--name", "me/tiny", "--out", tmp_path / "out") == 1
    assert "--license" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_gguf_base_is_told_of(tmp_path):
    source = resolve_model(str(tiny_gguf(tmp_path / "base.gguf")))
    write_export(source, random_masks(source), tmp_path / "export")
    options = ("--license", "mit", "--base", "owner/base", "--out", tmp_path / "out")
    assert run("publish", tmp_path / "export", "--name", "me/tiny", *options) == 0
    card = (tmp_path / "out" / "README.md").read_text()
    assert "GGUF" in card
    assert "base_model: owner/base" in card
    assert "--base owner/base" not in card, "its weights are not these"
    assert MaskSet.load(tmp_path / "out").base.spec == "base.gguf"
    assert verify_export(tmp_path / "out", source).ok


def spoiled(change):
    """A copy of the run with something changed in it."""

    def make(lab, folder):
        shutil.copytree(lab.folder / "run", folder / "run")
        change(folder / "run")
        return folder / "run" / "export"

    return make


def other_config(run_folder):
    config = yaml.safe_load((run_folder / "config.yaml").read_text())
    config["model"]["init_args"]["pattern"] = "1:4"
    (run_folder / "config.yaml").write_text(yaml.safe_dump(config))


@pytest.mark.parametrize(("label", "is_own"), [("2:4 + 4:8", True), ("4:8 + dense", False), ("1:4", False)])
def test_a_configuration_of_mixed_patterns_is_that_of_its_own_export(label, is_own, tmp_path):
    settings = {"lm": "m", "pattern": "2:4", "patterns": {"k_proj": "4:8"}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"model": {"init_args": settings}}))
    description = {"base": {"spec": "m"}, "pattern": label, "training": {"learner": "RoILightningModule"}}
    if is_own:
        assert "k_proj" in read_config(tmp_path / "export", description)
    else:
        with pytest.raises(UserError, match="is of another run"):
            read_config(tmp_path / "export", description)


def whole(lab, _folder):
    return lab.folder / "run" / "export"


@pytest.mark.parametrize(
    ("make", "options", "says"),
    [
        (whole, ("--name", "tiny"), "lacks its owner"),
        (whole, ("--name", "me/ti--ny"), "no name of a repository"),
        (whole, ("--base", "base"), "lacks its owner"),
        (lambda lab, _: lab.model, (), "does not verify.*roi_sparsity.json can't be read"),
        (spoiled(lambda x: (x / "export/LICENSE").write_text("x")), (), "does not verify.*LICENSE"),
        (spoiled(other_config), (), "is of another run: .* at 1:4"),
        (spoiled(lambda x: (x / "config.yaml").write_text("- x")), (), "is not what a run of fit leaves"),
        (whole, ("--evaluation", "none.json"), "'none.json' is no file"),
        (whole, ("--evaluated_as", "x"), "--evaluation, which is not given"),
        (whole, ("--out", "{lab}/shared"), "was not written by roi_lightning"),
        (whole, ("--out", "{lab}/run/export"), "is the export itself"),
        (whole, ("--evaluation", "{lab}/shared/model/config.json"), "has no models; give"),
        (
            whole,
            ("--evaluation", "{lab}/evaluation.json", "--evaluated_as", "x"),
            "no metrics of 'x', but of '/",
        ),
        (lambda lab, _: lab.folder / "pruned", ("--evaluation", "{lab}/evaluation.json"), "--evaluated_as"),
    ],
)
def test_what_can_t_be_published_is_refused(make, options, says, lab, tmp_path, capsys):
    directory = make(lab, tmp_path)
    before = sorted(tmp_path.rglob("*"))
    given = {"--name": "me/tiny", "--out": tmp_path / "out"}
    given |= dict(zip(options[::2], (x.format(lab=lab.folder) for x in options[1::2]), strict=True))
    assert run("publish", directory, *(word for pair in given.items() for word in pair)) == 1
    told = capsys.readouterr().err
    assert re.search(says, told), told
    assert len(told.splitlines()) == 1
    assert sorted(tmp_path.rglob("*")) == before


def test_a_folder_in_the_base_s_files_is_refused(lab, tmp_path, capsys):
    base = Path(shutil.copytree(lab.model, tmp_path / "base"))
    config = json.loads((base / "tokenizer_config.json").read_text())
    (base / "tokenizer_config.json").write_text(json.dumps(config | {"name_or_path": f"{tmp_path}/base"}))
    source = resolve_model(str(base))
    write_export(source, random_masks(source), tmp_path / "export")
    assert run("publish", tmp_path / "export", "--name", "me/tiny", "--out", tmp_path / "out") == 1
    assert "'tokenizer_config.json' names a folder of this machine" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A hub that can be reached, with nobody logged in."""
    with fake_hub() as server:
        reach(monkeypatch, server, tmp_path / "hub")
        yield server


# What huggingface-hub does to its own client.
@pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")
@pytest.mark.parametrize("large", ["(none)", ".safetensors"])
def test_pushing_uploads_exactly_what_was_written(large, hub, export, tmp_path, monkeypatch, capsys):
    hub.large = large
    monkeypatch.setenv("HF_TOKEN", "secret")
    options = ("--name", "me/tiny", "--out", tmp_path / "out", "--push", "--private")
    assert run("publish", export, *options) == 0
    assert f"{hub.endpoint}/me/tiny" in capsys.readouterr().out
    assert hub.files == {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert len([x for x in hub.requests if x.startswith("PUT /objects/")]) == (
        2 if large == ".safetensors" else 0
    )
    (repository,) = hub.repositories
    assert (repository["name"], repository["organization"]) == ("tiny", "me")
    assert repository.get("private") or repository.get("visibility") == "private"


@pytest.mark.parametrize(("token", "says"), [(None, "nobody is logged in"), ("wrong", "does not let you in")])
def test_without_a_login_nothing_is_done(token, says, hub, export, tmp_path, monkeypatch, capsys):
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    assert run("publish", export, "--name", "me/tiny", "--out", tmp_path / "out", "--push") == 1
    assert says in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert hub.requests == ([] if token is None else ["GET /api/whoami-v2"])


def test_without_out_it_is_written_beside_the_export(export, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(export.parent, "run")
    assert run("publish", "run/export", "--name", "me/tiny") == 0
    assert verify_export(tmp_path / "run" / "export-to-publish").ok
    assert "run/export-to-publish: written and verified" in capsys.readouterr().out


def test_without_push_the_hub_is_not_asked(hub, export, tmp_path, capsys):
    assert run("publish", export, "--name", "me/tiny", "--out", tmp_path / "out") == 0
    assert f"hf upload me/tiny {tmp_path / 'out'}" in capsys.readouterr().out
    assert hub.requests == []


def test_a_hub_that_refuses_leaves_the_directory(hub, export, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HF_TOKEN", "secret")
    options = ("--name", "me/other", "--out", tmp_path / "out", "--push")
    assert run("publish", export, *options) == 1
    assert "'me/other' could not be uploaded" in capsys.readouterr().err
    assert verify_export(tmp_path / "out").ok
