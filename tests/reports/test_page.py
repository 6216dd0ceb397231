"""The page of a report: what it says, what it escapes, what it refuses, and that it needs nothing but itself."""

import json
import math
import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from cli_helpers import run
from fake_runs import TEXT, evaluation, mask_story, start, write_leg, write_results, write_run
from roi_lightning.errors import UserError
from roi_lightning.evaluation.continuations import Decoding
from roi_lightning.export import write_export
from roi_lightning.models.source import resolve_model
from roi_lightning.reports import answers
from roi_lightning.reports.curves import Series, draw_curve, draw_perplexities, running_mean, thin
from roi_lightning.reports.figures import perplexities
from roi_lightning.reports.page import render, write_report
from roi_lightning.reports.sources import read_sources
from roi_lightning.reports.words import lead
from tiny_models import random_masks, tiny_llama, tiny_tokenizer

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
VOID = {"meta", "br", "hr", "img", "input", "link"}
MESSAGE = "the loss is not finite at optimizer step 29; resume with a lower learning rate"


class Page(HTMLParser):
    """What a browser sees: elements in balance, attributes, and the text of a section or element."""

    def __init__(self, html):
        super().__init__()
        self.open, self.tags, self.ids, self.attributes, self.shown = [], [], [], [], []
        self.feed(html)
        self.close()
        assert not self.open
        self.text = " ".join(" ".join(self.shown).split())

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, *pair) for pair in attrs]
        self.ids += [value for name, value in attrs if name == "id"]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if not {"style", "script", "title"} & {*self.open}:
            self.shown.append(data)


def rows(html, caption):
    """A table's rows below its caption, each a list of texts."""
    table = html[html.index(f">{caption}") :]
    table = table[: table.index("</table>")]
    lines = re.findall(r"<tr>(.*?)</tr>", table, re.DOTALL)
    return [[Page(cell).text for cell in re.findall(r"<t[hd].*?</t[hd]>", line)] for line in lines]


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory):
    """A run that has ended well."""
    folder = tmp_path_factory.mktemp("runs") / "quick<i>start"
    return write_run(folder, every=5, prompts=["<script>alert(1)</script> & more"])


@pytest.fixture(scope="module")
def html(quickstart):
    return render([quickstart], title="A <b>title</b>")


def test_the_page_is_whole_and_loads_nothing(html):
    page = Page(html)
    assert len(page.ids) == len({*page.ids})
    targets = [value[1:] for _, name, value in page.attributes if name == "href"]
    targets += re.findall(r"url\(#([\w-]+)\)", html)
    named = [value for _, name, value in page.attributes if name in ("aria-labelledby", "for")]
    assert {*targets, *named} <= {*page.ids}
    assert not {"link", "img", "iframe", "base", "form"} & {*page.tags}
    assert not [value for _, name, value in page.attributes if name in ("src", "srcset", "action", "data")]
    assert not re.search(r"https?:|url\((?!#)|@import|fetch\(|XMLHttp", html)
    assert ("meta", "content", POLICY) in page.attributes
    assert page.tags.count("main") == page.tags.count("h1") == 1


POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:; base-uri 'none'; "
    "form-action 'none'"
)


def test_what_was_done_in_three_sentences(html):
    leads = re.findall(r'<p class="lead">(.*?)</p>', html)
    assert leads == [
        "RoI learned which weights of smollm2-135m to keep: 2 of every 4 consecutive weights of 210 linear layers, "
        "starting from the activation mask.",
        "It took 45 optimizer steps on 46,080 tokens of python-docs: 3 min 9 s on CPU.",
        "On held-out text the perplexity goes from 17.50 (dense) to 36.80 (learned), 2.1 times as much; without "
        "learning it is 431.20 with the magnitude mask and 52.13 with the activation mask.",
    ]


def test_the_order_of_the_sections(html):
    assert re.findall(r"<h2[^>]*>(.*?)</h2>", html) == [
        "Perplexity on held-out text",
        "Facts",
        "Curves",
        "What the mask became",
        "What the models write",
        "How this was measured",
    ]


def test_what_users_and_models_write_is_escaped(html):
    assert "<script>alert" not in html
    assert "&lt;script&gt;alert(1)&lt;/script&gt; &amp; more" in html
    assert "<title>A &lt;b&gt;title&lt;/b&gt;</title>" in html
    assert "quick<i>start" not in html
    assert Page(html).tags.count("script") == 2


def test_a_name_can_not_end_the_data_of_the_charts(tmp_path):
    runs = [write_run(tmp_path / name) for name in ("a", "b")]
    runs[1].rename(tmp_path / "<!--<script>")
    html = render([runs[0], tmp_path / "<!--<script>"])
    data = json.loads(re.search(r'id="chart-data">(.*?)</script>', html, re.DOTALL)[1])
    assert [line["label"] for line in data["chart1"]["lines"]] == ["a", "<!--<script>"]
    assert "<!--" not in html


def test_perplexities_beside_the_baselines(html):
    table = rows(html, "Lower perplexities are better")
    assert table[2] == ["magnitude", "431.20", "×24.64", "50.0 %", "39.4 %"]
    assert table[4] == ["roi, learned", "36.80", "×2.10", "50.0 %", "39.4 %"]


def test_changes_by_layer_are_those_counted(html):
    changed = mask_story()["changed"]
    table = rows(html, "Kept weights that the activation mask does not keep")
    assert table[0] == ["block", "q", "k", "v", "o", "gate", "up", "down"]
    both = changed["model.layers.7.mlp.up_proj.weight"]["both"]
    assert table[8][6] == f"{100 * (1 - both / 10_000):.1f}"
    of_kind = [count["both"] for name, count in changed.items() if "k_proj" in name]
    assert table[-1][2] == f"{100 * (1 - sum(of_kind) / (10_000 * len(of_kind))):.1f}"


def test_changed_cells_of_corners_are_marked(html):
    for corner in mask_story()["corners"]:
        pairs = zip("".join(corner["before"]), "".join(corner["after"]), strict=True)
        changed = sum(before != after for before, after in pairs)
        layer = corner["layer"].removesuffix(".weight")
        assert f'aria-label="{layer} after: {changed} of 64 cells changed"' in html


def test_continuations_side_by_side(html):
    page = Page(html).text
    assert TEXT.strip() in page
    article = html[html.index('<article class="continuation">') :]
    article = article[: article.index("</article>")]
    heads = re.findall(r"<h4>(.*?)</h4>", article)
    assert heads == ["how the text goes on", "dense", "activation", "roi"]


def test_a_run_that_failed_says_so_first(tmp_path):
    folder = tmp_path / "bad"
    write_leg(folder, last=20, status="interrupted")
    write_leg(folder, first=20, last=30, status=None)
    write_leg(folder, first=20, last=29, status="failed", message=MESSAGE, command=[
        "fit", "--config", "quickstart.yaml", "--resume", "auto"])  # fmt: skip
    html = render([folder])
    page = Page(html).text
    assert page.startswith(f"The run “bad” failed at step 29 of 45 {MESSAGE}")
    assert html.index(MESSAGE) < html.index("<h1>")
    assert "roi-lightning fit --config quickstart.yaml --resume auto" in page
    legs = re.findall(r"<li>((?:Started|Resumed) .*?)</li>", html)
    assert [re.sub(r" \(.*?\)", "", leg) for leg in legs] == [
        "Started at step 0 and was interrupted at step 20.",
        "Resumed at step 20 and was killed.",
        "Resumed at step 20 and failed at step 29.",
    ]
    assert "written when a run finishes" in page


def test_a_run_without_an_end_is_called_so(tmp_path):
    write_leg(tmp_path / "cut", last=7, status=None, command=[])
    page = Page(render([tmp_path / "cut"])).text
    assert page.startswith("The run “cut” has no end: its record stops at step 7 of 45")
    assert "the same command as before and --resume auto" in page


def test_a_run_that_was_killed_after_its_results_is_called_so(tmp_path):
    write_leg(tmp_path / "cut", status=None)
    write_results(tmp_path / "cut")
    page = Page(render([tmp_path / "cut"])).text
    assert page.startswith("The run “cut” has no end: its record stops at step 45 of 45")


def test_values_that_are_not_finite_are_marked(tmp_path):
    points = [(1, 3.0), (2, 2.5), (3, math.inf), (4, math.nan)]
    chart = draw_curve("c", "Loss", "", [Series("", points)])
    assert "not finite at step 3, 4" in chart.summary[0]
    assert chart.data["lines"][0]["values"] == [3.0, 2.5, "∞", "NaN"]
    assert [row[1] for row in chart.rows] == ["3", "2.5", "∞", "NaN"]


def test_a_folder_with_little_says_what_would_bring_more(tmp_path):
    write_leg(tmp_path / "bare")
    page = Page(render([tmp_path / "bare"])).text
    assert "No summary.json: add BaselineSummary" in page
    assert "No report.json: add Report" in page
    assert "No export: add SparseExport" in page
    (tmp_path / "older").mkdir()
    write_results(tmp_path / "older")
    assert "No record.jsonl" in Page(render([tmp_path / "older"])).text


def test_several_runs_side_by_side(tmp_path):
    runs = [write_run(tmp_path / name, seed=seed) for seed, name in enumerate(("one", "two"))]
    html = render(runs)
    table = rows(html, "Lower perplexities are better")
    assert [row[:2] for row in table[1:]] == [
        ["dense", "17.50"],
        ["magnitude", "431.20"],
        ["activation", "52.13"],
        ["one", "36.80"],
        ["two", "35.80"],
    ]
    page = Page(html).text
    assert "The lowest perplexity on held-out text is 35.80, of two; the dense model has 17.50" in page
    facts = html[html.index('<table class="facts">') :]
    assert re.search(r'<th scope="row">model</th><td colspan="2"><span>smollm2-135m', facts)
    assert re.search(
        r'<th scope="row">folder</th><td class="code">.*?one</td><td class="code">.*?two</td>', facts
    )
    data = json.loads(re.search(r'id="chart-data">(.*?)</script>', html, re.DOTALL)[1])
    assert {tuple(line["number"] for line in chart["lines"]) for chart in data.values()} == {(1, 2)}


def test_runs_measured_on_different_texts_are_compared_by_ratios(tmp_path):
    runs = [write_run(tmp_path / name, seed=seed) for seed, name in enumerate(("one", "two"))]
    file = runs[1] / "summary.json"
    summary = json.loads(file.read_text())
    summary["perplexity"] |= {"dense": 10.0}
    file.write_text(json.dumps(summary))
    sources = read_sources(runs)
    sentence = lead(sources)[2]
    assert "different held-out texts" in sentence
    assert "lowest for one, 2.1, and highest for two, 3.58" in sentence  # 36.8 / 17.5 and 35.8 / 10
    labels = [(row.label, row.value) for row in perplexities(sources.masks)]
    assert ("dense: one", 17.5) in labels
    assert ("dense: two", 10.0) in labels
    assert ("magnitude: one, two", 431.2) in labels


def test_curves_show_points_where_the_data_say(tmp_path):
    points = [(1, 60.0), (4, 12.5), (9, 7.0), (20, 6.0)]
    chart = draw_curve("c", "Perplexity", "", [Series("", points)], log=True)
    assert chart.data["log"]
    drawn = re.findall(r'<path d="M ([\d. ]+(?:L [\d. ]+)+)" clip', chart.svg)
    ends = [[float(x) for x in re.findall(r"[\d.]+", path)] for path in drawn]
    (line,) = [end for end in ends if len(end) == 2 * len(points)]
    (low, high, left, right), (down, up, bottom, top) = chart.data["x"], chart.data["y"]
    for (step, value), x, y in zip(points, line[::2], line[1::2], strict=True):
        assert x == pytest.approx(left + (step - low) / (high - low) * (right - left), abs=0.11)
        share = math.log(value / down) / math.log(up / down)
        assert y == pytest.approx(bottom + share * (top - bottom), abs=0.11)


def test_thinning_loses_no_spike():
    generator = torch.Generator().manual_seed(0)
    values = torch.rand(20_000, generator=generator).tolist()
    values[777], values[12_345], values[15_000] = 9.0, -9.0, math.nan
    points = [*enumerate(values, start=1)]
    kept = thin(points)
    assert len(kept) <= 301 + 2
    assert kept == sorted(kept, key=lambda point: point[0])
    assert {points[0], points[777], points[12_345], points[-1]} <= {*kept}
    assert any(math.isnan(value) for _, value in kept)
    assert thin(points[:300]) == points[:300]


def test_the_running_mean_skips_what_is_not_finite():
    points = [(1, 1.0), (2, 3.0), (3, math.nan), (4, 5.0)]
    assert running_mean(points, 2) == [(1, 1.0), (2, 2.0), (4, 4.0)]


def test_perplexities_that_are_infinite_are_drawn():
    chart = draw_perplexities("p", [("dense", 17.5, 0), ("magnitude", math.inf, 0)])
    assert ">∞<" in chart.svg


def test_figures_of_evaluate_beside_dense_with_errors(tmp_path):
    file = tmp_path / "metrics.json"
    file.write_text(json.dumps(evaluation()))
    html = render([file])
    table = rows(html, "Results of evaluate")
    head = ["model", "token perplexity", "word perplexity", "hellaswag acc, %", "hellaswag acc norm, %"]
    assert table[0] == [*head, "piqa acc, %", "average acc, %"]
    assert table[1][:4] == ["smollm2-135m (dense)", "17.50", "38.10", "35.00 ±0.47"]
    assert table[2][1:4] == ["36.80 ×2.10", "∞", "29.00 −6.00 ±0.45"]
    assert "batch size 8" in Page(html).text


def test_overlaps_of_compare(tmp_path):
    pair = {"a": "roi", "b": "wanda", "all": 0.8125, "kinds": {"q_proj": 0.75}, "layers": {}}
    content = {"overlap": [pair], "pattern": "2:4", "masks": {"roi": "a", "wanda": "b"}, "reference": "wanda"}
    (tmp_path / "overlap.json").write_text(json.dumps(content))
    for source in (tmp_path, tmp_path / "overlap.json"):
        table = rows(render([source]), "Weights that both 2:4 masks keep")
        assert table == [["masks", "all", "q"], ["roi and wanda", "81.2", "75.0"]]


def test_an_exported_directory():
    page = Page(render([GOLDEN / "export"])).text
    assert "weights of model to keep: 2 of every 4 consecutive weights of 7 linear layers" in page
    assert "roi-lightning verify" in page
    assert "no curves" in page


def test_mixed_patterns_are_called_so_and_counted(tmp_path):
    mixed = start()["run"] | {"pattern": "2:4 + 4:8 + dense", "mixed_patterns": {"kept": 60, "prunable": 96}}
    runs = [write_run(tmp_path / "mixed", run=mixed), write_run(tmp_path / "plain")]
    page = Page(render(runs[:1])).text
    assert "to keep: mixed patterns (2:4 + 4:8 + dense), 62.5% of the weights of 210 linear layers" in page
    assert "2:4 + 4:8 + dense, mixed patterns: 60 of 96 prunable weights kept, 62.5%" in page
    assert "Mixed patterns are a class of their own" in Page(render(runs)).text


def test_weights_that_were_trained_along_are_named(tmp_path):
    run = write_run(tmp_path / "both", run=start()["run"] | {"method": "roi+weights"})
    page = Page(render([run])).text
    assert "RoI with trained weights on smollm2-135m at 2:4" in page


def test_commands_have_the_paths_of_the_run(tmp_path):
    folder = write_run(tmp_path / "my run")
    shutil.copytree(GOLDEN / "export", folder / "export")
    page = Page(render([folder])).text
    assert f"roi-lightning verify '{folder}/export' --base smollm2-135m" in page
    assert f"roi-lightning pack '{folder}/export' --out '{folder}/export-packed'" in page
    assert f"from_pretrained({str(folder / 'export')!r})" in page


def test_only_a_page_of_ours_is_replaced(quickstart, tmp_path):
    out = tmp_path / "new" / "page.html"
    write_report([GOLDEN / "export"], out)
    first = out.read_bytes()
    with pytest.raises(UserError, match=r"there is no '.*nowhere'"):
        write_report([tmp_path / "nowhere"], out)
    assert out.read_bytes() == first
    write_report([quickstart], out)
    assert out.read_bytes() != first
    out.write_text("<html>mine</html>")
    with pytest.raises(UserError, match="is no report; give another path, or --overwrite"):
        write_report([quickstart], out)
    assert out.read_text() == "<html>mine</html>"
    write_report([GOLDEN / "export"], out, overwrite=True)
    assert out.read_bytes() == first
    assert [path.name for path in out.parent.iterdir()] == ["page.html"]


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda path: path.mkdir(), "has nothing to report; give a run's folder"),
        (lambda path: path.write_text("{}"), "is nothing that evaluate or compare wrote; give"),
        (lambda path: path.write_text("{"), "can't be read: .*; write it again"),
        (lambda path: path.write_text("[]"), "holds no JSON object; write it again"),
        (lambda path: write_run(path / "x"), r"did you mean '.*thing/x'\?"),
    ],
)
def test_what_is_no_source_is_refused(tmp_path, make, told):
    make(tmp_path / "thing")
    with pytest.raises(UserError, match=told):
        render([tmp_path / "thing"])


def test_a_source_given_twice_is_refused(quickstart):
    with pytest.raises(UserError, match="is given twice; give every run once"):
        render([quickstart, quickstart / "."])


def test_the_command(quickstart, tmp_path, capsys):
    out = tmp_path / "page.html"
    assert run("report", quickstart, "--out", out, "--title", "Mine") == 0
    assert re.fullmatch(r".*page\.html: 0\.\d\d MB, needs no other file\n", capsys.readouterr().out)
    assert "<h1>Mine</h1>" in out.read_text()


def test_prompts_of_the_reader_are_continued(tmp_path, monkeypatch):
    monkeypatch.setattr(answers, "_DECODING", Decoding(max_new_tokens=6))
    base = tiny_llama(tmp_path / "base")
    source = resolve_model(str(base))
    folder = tmp_path / "run"
    write_export(source, random_masks(source, seed=1), folder / "export")
    random_masks(source, seed=2).save(folder / "prior.safetensors")
    write_leg(folder)
    record = folder / "record.jsonl"
    record.write_text(record.read_text().replace('"smollm2-135m"', json.dumps(str(base))))
    (tmp_path / "prompts.txt").write_text("the cat sat\n")
    assert run("report", folder, "--out", tmp_path / "o.html", "--prompts", tmp_path / "prompts.txt") == 0
    article = (tmp_path / "o.html").read_text().split('<article class="continuation">')[1]
    found = dict(re.findall(r'<h4>(.*?)</h4><p class="text">(.*?)</p>', article, re.DOTALL))
    assert list(found) == ["dense", "prior", "RoI"]
    for name, path in (("dense", base), ("RoI", folder / "export")):
        lm, tokenizer = AutoModelForCausalLM.from_pretrained(path), tiny_tokenizer()
        ids = tokenizer("the cat sat", return_tensors="pt")["input_ids"]
        out = lm.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False)
        wanted = tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
        assert Page(f"<p>{found[name]}</p>").text == " ".join(wanted.split())
    assert len({*found.values()}) == 3


def test_prompts_without_a_mask_are_refused(quickstart, tmp_path):
    with pytest.raises(UserError, match="has no mask yet that could continue --prompts; finish the run"):
        render([quickstart], prompts=["x"])


def test_matplotlib_comes_with_the_first_page_only():
    probe = (
        "import sys, roi_lightning.reports.page; print(*{'matplotlib', 'jinja2', 'torch'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


@pytest.mark.slow
def test_six_long_runs_fit_three_megabytes(tmp_path):
    runs = [write_run(tmp_path / f"run{i}", seed=i, max_steps=2000, every=1) for i in range(6)]
    write_report(runs, tmp_path / "page.html")
    assert (tmp_path / "page.html").stat().st_size < 3e6


@pytest.mark.slow
@pytest.mark.skipif(not os.environ.get("VNU_JAR"), reason="VNU_JAR names no vnu.jar")
def test_the_w3c_checker_has_no_complaint(html, tmp_path):
    (tmp_path / "page.html").write_text(html)
    command = ["java", "-jar", os.environ["VNU_JAR"], "--stdout", str(tmp_path / "page.html")]
    assert subprocess.run(command, capture_output=True, text=True, check=False).stdout == ""
