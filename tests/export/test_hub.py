"""Models and data sets by their hub ids, from a hub in this process."""

import json
import re
import socket
from pathlib import Path

import pytest
import torch
import yaml

from helpers.fake_hub import Repository, commit_of, fake_hub, reach
from helpers.lab import run
from helpers.refusals import LONGEST_LINE, make_bench
from helpers.text_files import documents, write_jsonl
from helpers.tiny_models import tiny_gguf, tiny_qwen2
from roi_lightning.contrib.packed import from_packed
from roi_lightning.data.corpora import Corpus, load_documents
from roi_lightning.errors import UserError
from roi_lightning.evaluation.perplexity import read_text
from roi_lightning.models.source import resolve_model

bench = pytest.fixture(make_bench)
FIRST, SECOND = f"{1:040x}", f"{2:040x}"


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A hub with nobody logged in, and a cache that holds nothing yet."""
    with fake_hub() as server:
        reach(monkeypatch, server, tmp_path / "hub")
        yield server


@pytest.fixture
def tiny(hub, bench):
    """`me/tiny` in two versions: the lab's model, tagged v1, and another with a tokenizer of other words."""
    newer = tiny_qwen2(bench.folder / "newer", seed=1)
    tokenizer = json.loads((newer / "tokenizer.json").read_text())
    tokenizer["added_tokens"].append(tokenizer["added_tokens"][0] | {"id": 258, "content": "<|new|>"})
    (newer / "tokenizer.json").write_text(json.dumps(tokenizer))
    hub.holds["models/me/tiny"] = Repository(commit_of(bench.model, newer), {"v1": FIRST})
    return hub.holds["models/me/tiny"]


def texts(mark):
    return documents(40, mark)


@pytest.fixture
def corpus(hub, tmp_path):
    """`me/texts` in two configurations, `large` by default and `small`, the latter with two splits."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for mark in ("large", "small", "held"):
        write_jsonl(folder / f"{mark}.jsonl", texts(mark), "body")
    small = [{"split": "train", "path": "small.jsonl"}, {"split": "test", "path": "held.jsonl"}]
    configs = [
        {"config_name": "large", "data_files": "large.jsonl", "default": True},
        {"config_name": "small", "data_files": small},
    ]
    (folder / "README.md").write_text(f"---\n{yaml.safe_dump({'configs': configs})}---\n")
    hub.holds["datasets/me/texts"] = Repository(commit_of(folder))
    return hub.holds["datasets/me/texts"]


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("options", "mark"),
    [({}, "large"), ({"subset": "small"}, "small"), ({"subset": "small", "split": "test"}, "held")],
)
def test_a_data_set_s_rows_are_its_documents(corpus, tmp_path, options, mark, streaming):
    wanted = Corpus("me/texts", text_field="body", streaming=streaming, **options)
    rows = load_documents(wanted, str(tmp_path / "prepared"))
    assert [row["text"] for row in rows] == texts(mark)


def test_wikitext_is_the_original_file(hub, tmp_path):
    rows = ["", " = Title = \n", "", " A line . \n"]
    folder = tmp_path / "wikitext"
    folder.mkdir()
    write_jsonl(folder / "test.jsonl", rows)
    config = {"config_name": "wikitext-2-raw-v1", "data_files": [{"split": "test", "path": "test.jsonl"}]}
    (folder / "README.md").write_text(f"---\n{yaml.safe_dump({'configs': [config]})}---\n")
    hub.holds["datasets/Salesforce/wikitext"] = Repository(commit_of(folder))
    assert read_text(None).whole == " \n = Title = \n \n A line . \n"


def hub_text(bench, streaming):
    source = f"{{source: me/texts, subset: small, text_field: body, streaming: {str(streaming).lower()}}}"
    return bench.write("hub.yaml", f"data: {{corpora: [{source}]}}")


def test_a_mask_is_learned_exported_verified_and_measured(tiny, corpus, bench):
    options = ["-c", hub_text(bench, streaming=True), "--model.lm", "me/tiny", "--model.revision", "v1"]
    assert run("fit", *bench.lean(max_steps=1), *options, "--trainer.callbacks+", "SparseExport") == 0
    (sidecar,) = bench.folder.rglob("roi_sparsity.json")
    base = json.loads(sidecar.read_text())["base"]
    assert (base["spec"], base["revision"]) == ("me/tiny", FIRST)
    # The newer commit is what the bare name means; export and mask know theirs.
    assert run("verify", sidecar.parent, "--base", "me/tiny") == 0
    assert run("apply", "me/tiny", sidecar.parent, "--out", "applied") == 0
    assert run("verify", sidecar.parent, "--base", bench.model) == 0
    mask = sidecar.parent / "roi_mask.safetensors"
    options = ["--text", bench.corpus, "--seq_len", "32", "--limit", "2", "--json", "figures.json"]
    assert run("evaluate", mask, "--base", "me/tiny", *options) == 0
    by_id = json.loads(Path("figures.json").read_text())["models"]
    assert run("evaluate", mask, "--base", bench.model, *options) == 0
    assert by_id[str(mask)] == json.loads(Path("figures.json").read_text())["models"][str(mask)]


def test_the_run_s_revision_is_its_tokenizer_s(tiny, corpus, bench, hub):
    options = ["-c", hub_text(bench, streaming=False), "--model.lm", "me/tiny", "--model.revision", "v1"]
    assert run("fit", *bench.lean(max_steps=1), *options) == 0
    fetched = [request for request in hub.requests if "/me/tiny/resolve/" in request]
    assert fetched
    assert not [request for request in fetched if "main" in request or SECOND in request]


def test_a_packed_directory_runs_by_its_hub_id(hub, bench):
    hub.holds["models/me/packed"] = Repository(commit_of(bench.packed))
    ids = torch.arange(24).reshape(2, 12) * 7 % 256
    with torch.no_grad():
        assert torch.equal(from_packed("me/packed")(ids).logits, from_packed(bench.packed)(ids).logits)


def test_what_is_in_the_cache_needs_no_hub(tiny, bench, hub, monkeypatch):
    directory = resolve_model("me/tiny", FIRST).directory
    hub.requests.clear()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert resolve_model("me/tiny", FIRST).directory == directory
    assert run("plan", *bench.lean(), "--model.lm", "me/tiny", "--model.revision", FIRST) == 0
    assert hub.requests == []


LOGIN = r"your login \(hf auth login\)"
# The token, the model, its revision, and what is said.
REFUSED = {
    "gated, nobody logged in": (None, "me/tiny", None, f"'me/tiny'.* gated .*{LOGIN}"),
    "no such model": (
        "secret",
        "me/none",
        None,
        f"'me/none'.*(not a valid|Not Found).*check the name.*{LOGIN}",
    ),
    "no such revision": ("secret", "me/tiny", "v9", "'me/tiny'.*v9.*check the name, the revision"),
}


def prune(name, revision, bench):
    pinned = ["--revision", revision] if revision else []
    return ["prune", name, "--method", "magnitude", "--out", "out", *pinned]


def assert_says(capsys, says):
    (line,) = (line for line in capsys.readouterr().err.splitlines() if line.startswith("error: "))
    assert re.search(says, line), line
    assert len(line) < LONGEST_LINE


@pytest.mark.parametrize(("token", "name", "revision", "says"), REFUSED.values(), ids=REFUSED)
def test_what_the_hub_refuses_is_one_clear_line(
    tiny, bench, monkeypatch, capsys, token, name, revision, says
):
    tiny.gated = True
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    assert run(*prune(name, revision, bench)) == 1
    assert_says(capsys, says)
    with pytest.raises(UserError, match=says):
        _ = resolve_model(name, revision).directory


def test_with_a_login_what_is_gated_is_read(tiny, monkeypatch):
    tiny.gated = True
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert resolve_model("me/tiny", "v1").commit == FIRST


def test_a_download_that_was_cut_off_is_no_model(tiny, bench, capsys):
    tiny.cut.add("model.safetensors")
    assert run(*prune("me/tiny", None, bench)) == 1
    assert_says(capsys, "'me/tiny' .hub. can't be read: .*check")
    tiny.cut.clear()
    assert run(*prune("me/tiny", None, bench)) == 0


def test_the_quickstart_asks_no_network(bench, monkeypatch):
    """Online as a user is, with a GGUF file and text that is read as Python's documentation is."""
    for name in ("huggingface_hub.constants.HF_HUB_OFFLINE", "datasets.config.HF_HUB_OFFLINE"):
        monkeypatch.setattr(name, False)
    tried = []
    monkeypatch.setattr(socket.socket, "connect", lambda _self, address: tried.append(address))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *address, **_: tried.append(address))
    model = tiny_gguf(bench.folder / "model.gguf")
    text = bench.write("text.txt", "\n\n".join(documents(2000)))
    held_out = ["--data.corpora", text, "--data.held_out_fraction", "0.3"]
    assert run("fit", *bench.quick(*held_out, max_steps=1, model=model)) == 0
    (sidecar,) = bench.folder.rglob("roi_sparsity.json")
    assert run("verify", sidecar.parent, "--base", model) == 0
    assert run("evaluate", model, sidecar.parent, "--text", text, "--seq_len", "32", "--limit", "2") == 0
    assert not tried
