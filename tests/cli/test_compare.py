import io
import json
import re
import shutil
import subprocess
import sys

import pytest
import torch
from PIL import Image

from roi_lightning import plots as pictures
from roi_lightning.__main__ import main
from roi_lightning.cli import compare
from roi_lightning.errors import UserError
from roi_lightning.export import write_export
from roi_lightning.masks.layer_mask import LayerMask
from roi_lightning.masks.mask_set import BaseModel, MaskSet
from roi_lightning.masks.overlap import shown_layers
from roi_lightning.masks.pattern import NMPattern
from roi_lightning.models.source import resolve_model
from tiny_models import random_masks, tiny_gpt2, tiny_qwen2

FILES = {"overlap.json", "overlap.md", "masks.png", "overlap_by_layer.png"}
QWEN = {
    "self_attn.q_proj": (12, 32),
    "self_attn.k_proj": (6, 32),
    "mlp.up_proj": (20, 32),
    "mlp.down_proj": (12, 64),
}
GPT2 = {"attn.c_attn": (24, 16), "attn.c_proj": (16, 16), "mlp.c_fc": (32, 16), "mlp.c_proj": (16, 32)}


def names_of(kinds, blocks, prefix):
    return {f"{prefix}.{i}.{kind}.weight": shape for i in range(blocks) for kind, shape in kinds.items()}


def mask_set(seed, pattern="2:4", shapes=None, transposed=False, base="some/model"):
    """Random masks; shapes are [out, in] by name."""
    generator, rule = torch.Generator().manual_seed(seed), NMPattern(pattern)
    layers = {}
    for name, shape in (shapes or names_of(QWEN, 4, "model.layers")).items():
        kept = rule.top(torch.rand(shape, generator=generator))
        layers[name] = LayerMask.from_bool(kept.T if transposed else kept, transposed)
    return MaskSet(rule, layers, BaseModel(base, None, "float32", dict.fromkeys(layers, base)))


@pytest.fixture
def files(tmp_path):
    """Three mask files of one model."""
    for i, name in enumerate(("magnitude", "wanda", "roi")):
        mask_set(i).save(tmp_path / f"{name}.safetensors")
    return [str(tmp_path / f"{name}.safetensors") for name in ("magnitude", "wanda", "roi")]


def run(*arguments):
    return main(["compare", *map(str, arguments)])


def slow_share(pairs):
    """Kept by both ÷ kept, one weight at a time."""
    both = kept = 0
    for a, b in pairs:
        for x, y in zip(a.flatten().tolist(), b.flatten().tolist(), strict=True):
            both, kept = both + (x and y), kept + x
    return both / kept


@pytest.mark.parametrize("pattern", ["2:4", "2:8", "4:8"])
@pytest.mark.parametrize("transposed", [False, True])
def test_overlap_is_what_a_slow_loop_counts(pattern, transposed):
    shapes = names_of(GPT2, 2, "h") if transposed else names_of(QWEN, 2, "model.layers")
    a, b = (mask_set(seed, pattern, shapes, transposed) for seed in (0, 1))
    overlap = a.overlap(b)
    bools = {name: (a.layers[name].to_bool(), b.layers[name].to_bool()) for name in shapes}
    assert overlap.layers == {name: slow_share([pair]) for name, pair in bools.items()}
    for kind, share in overlap.kinds.items():
        assert share == slow_share([pair for name, pair in bools.items() if f".{kind}." in name])
    assert overlap.all == slow_share(bools.values())
    assert b.overlap(a).all == overlap.all


def test_two_unrelated_masks_share_half():
    shapes = {"h.0.a.weight": (2048, 2048)}
    a, b = (mask_set(seed, shapes=shapes) for seed in (0, 1))
    assert a.overlap(b).all == pytest.approx(0.5, abs=0.001)
    assert a.overlap(a).all == 1
    other = LayerMask.from_bool(~a.layers["h.0.a.weight"].to_bool())
    assert a.overlap(MaskSet(a.pattern, {"h.0.a.weight": other}, a.base)).all == 0


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("shape", "columns"), [((12, 32), 8), ((12, 32), 16), ((3, 4), 8), ((9, 12), 12)])
def test_the_corner_is_that_of_the_mask(shape, columns, transposed):
    layer = mask_set(0, shapes={"h.0.a.weight": shape}, transposed=transposed).layers["h.0.a.weight"]
    bools = layer.to_bool().T if transposed else layer.to_bool()
    assert pictures.corner(layer, columns).tolist() == bools[:8, :columns].tolist()


def panels(figure):
    """(row, column) → axes."""
    return {tuple(map(int, axes.get_label().split(","))): axes for axes in figure.axes}


@pytest.mark.parametrize(("pattern", "columns"), [("2:4", 8), ("4:16", 16)])
def test_panels_show_the_masks_and_their_overlap(pattern, columns):
    masks = {name: mask_set(i, pattern) for i, name in enumerate(("one", "two", "three"))}
    layers = shown_layers(list(masks["one"].layers))
    figure = pictures.mask_figure(masks, "two", layers)
    drawn = panels(figure)
    assert len(drawn) == 9
    for (row, column), axes in drawn.items():
        label, name = list(masks)[column], layers[row]
        kept = masks[label].layers[name].to_bool()
        assert axes.images[0].get_array().tolist() == kept[:8, :columns].tolist()
        title, last = axes.get_title().split("\n")
        share = slow_share([(kept, masks["two"].layers[name].to_bool())])
        assert title == label
        assert last == ("reference" if label == "two" else f"{100 * share:.1f} %")
    assert pattern in figure.texts[0].get_text()


def test_dark_pixels_are_the_kept_weights():
    masks = {name: mask_set(i) for i, name in enumerate(("one", "two"))}
    layers = shown_layers(list(masks["one"].layers))
    figure = pictures.mask_figure(masks, "two", layers)
    with Image.open(io.BytesIO(pictures.to_png(figure))) as image:
        grey = image.convert("L")
    for (row, column), axes in panels(figure).items():
        kept = pictures.corner(masks[list(masks)[column]].layers[layers[row]])
        box = axes.get_position()
        for i in range(kept.shape[0]):
            for j in range(kept.shape[1]):
                x = (box.x0 + (j + 0.5) / kept.shape[1] * box.width) * grey.width
                y = (1 - box.y1 + (i + 0.5) / kept.shape[0] * box.height) * grey.height
                assert (grey.getpixel((int(x), int(y))) < 128) == kept[i, j]


LONG = "runs/a_name_that_says_everything_about_the_run_and_then_some_more/version_12/and/a/file"


@pytest.mark.parametrize(
    "labels",
    [["a", "b"], [f"method_{i}" for i in range(8)], [LONG, "x" * 90, "$a_b$ _c", "_under"]],
    ids=["two", "eight", "long"],
)
@pytest.mark.parametrize(
    "shapes", [None, names_of({"x" * 70: (3, 4)}, 1, "deep." * 20 + "h")], ids=["", "small"]
)
def test_no_text_is_cut_off_or_runs_into_another(labels, shapes):
    masks = {name: mask_set(i, shapes=shapes) for i, name in enumerate(labels)}
    layers = shown_layers(list(masks[labels[0]].layers))
    others = {name: masks[name].overlap(masks[labels[-1]]) for name in labels[:-1]}
    for figure in (
        pictures.mask_figure(masks, labels[-1], layers),
        pictures.layer_figure(others, labels[-1], 0.5),
    ):
        figure.draw_without_rendering()
        texts = [*figure.texts, *(text for legend in figure.legends for text in legend.get_texts())]
        texts += [text for axes in figure.axes for text in (axes.title, axes.yaxis.label)]
        boxes = [text.get_window_extent() for text in texts if text.get_text()]
        page = figure.bbox
        for i, box in enumerate(boxes):
            assert page.x0 <= box.x0 <= box.x1 <= page.x1
            assert page.y0 <= box.y0 <= box.y1 <= page.y1
            assert not any(box.overlaps(other) for other in boxes[:i])


def test_a_user_s_style_changes_nothing():
    import matplotlib

    masks = {name: mask_set(i) for i, name in enumerate(("one", "two"))}
    layers = shown_layers(list(masks["one"].layers))
    plain = pictures.to_png(pictures.mask_figure(masks, "two", layers))
    with matplotlib.rc_context({"font.size": 30, "axes.titlecolor": "red", "savefig.bbox": "tight"}):
        assert pictures.to_png(pictures.mask_figure(masks, "two", layers)) == plain
        assert matplotlib.rcParams["font.size"] == 30


def test_the_middle_block_s_layers_are_shown():
    qwen = list(names_of(QWEN, 5, "model.layers"))
    shown = [
        f"model.layers.2.{kind}.weight" for kind in ("self_attn.q_proj", "self_attn.k_proj", "mlp.up_proj")
    ]
    assert shown_layers(qwen) == shown
    thrice = [name.replace(".2.", f".{block}.") for block in (0, 2, 4) for name in shown]
    assert shown_layers(qwen, (0, 0.5, 1)) == thrice
    assert shown_layers(sorted(qwen)) == shown
    gpt2 = [f"h.1.{kind}.weight" for kind in ("attn.c_attn", "attn.c_proj", "mlp.c_fc")]
    assert shown_layers(list(names_of(GPT2, 2, "h"))) == gpt2
    assert shown_layers(["a.weight", "b.weight"]) == ["a.weight", "b.weight"]
    hybrid = [name for name in qwen if ".2.self_attn" not in name]
    assert shown_layers(hybrid)[0] == "model.layers.3.self_attn.q_proj.weight"


def test_layers_are_found_by_name_end_and_glob():
    names = list(names_of(QWEN, 4, "model.layers"))
    assert pictures.find_layers(names, [names[5]]) == [names[5]]
    assert pictures.find_layers(names, ["1.mlp.up_proj", "model.layers.0.self_attn.q_proj"]) == [
        names[6],
        names[0],
    ]
    assert pictures.find_layers(names, ["*.3.mlp.*", names[-1]]) == names[-2:]
    with pytest.raises(UserError, match=r"'q_prj'; did you mean 'q_proj'"):
        pictures.find_layers(names, ["q_prj"])
    with pytest.raises(UserError, match=r"did you mean 'model\.layers\.1\.mlp\.up_proj"):
        pictures.find_layers(names, ["model.layers.1.mlp.up_prj.weight"])
    with pytest.raises(UserError, match="names like"):
        pictures.find_layers(names, ["0"])
    with pytest.raises(UserError, match="matches 16 layers"):
        pictures.find_layers(names, ["*"])


def test_blocks_are_drawn_by_place():
    a, b = (mask_set(seed, shapes=names_of(GPT2, 3, "h"), transposed=True) for seed in (0, 1))
    overlap = a.overlap(b)
    places = pictures.by_place(overlap)
    assert list(places) == list(GPT2)
    for place, blocks in places.items():
        assert blocks == {i: overlap.layers[f"h.{i}.{place}.weight"] for i in range(3)}
    figure = pictures.layer_figure({"a": overlap}, "b", 0.5)
    for axes, blocks in zip(figure.axes, places.values(), strict=True):
        chance, line = axes.lines
        assert list(chance.get_ydata()) == [50, 50]
        assert list(line.get_ydata()) == [100 * share for share in blocks.values()]
    experts = {f"layers.{i}.mlp.experts.{j}.up.weight": (4, 8) for i in range(2) for j in range(3)}
    a, b = (mask_set(seed, shapes=experts) for seed in (0, 1))
    shares = pictures.by_place(a.overlap(b))
    assert list(shares) == ["experts.up"]
    assert shares["experts.up"][1] == pytest.approx(sum(list(a.overlap(b).layers.values())[3:]) / 3)


def test_the_command_writes_tables_and_pictures(files, tmp_path, capsys):
    out, extra = tmp_path / "deep" / "out", tmp_path / "extra.json"
    assert run(*files, "--out", out, "--json", extra) == 0
    assert {path.name for path in out.iterdir()} == FILES
    result = json.loads((out / "overlap.json").read_text())
    assert extra.read_bytes() == (out / "overlap.json").read_bytes()
    assert result["pattern"] == "2:4"
    assert result["masks"] == dict(zip(("magnitude", "wanda", "roi"), files, strict=True))
    assert [(row["a"], row["b"]) for row in result["overlap"]] == [
        ("magnitude", "wanda"),
        ("magnitude", "roi"),
        ("wanda", "roi"),
    ]
    overlap = mask_set(1).overlap(mask_set(2))
    row = {"a": "wanda", "b": "roi", "all": overlap.all, "kinds": overlap.kinds, "layers": overlap.layers}
    assert result["overlap"][2] == row
    printed = capsys.readouterr()
    assert not printed.err
    assert f"{100 * overlap.all:.1f}" in re.search(r"^ +wanda +(.*)$", printed.out, re.MULTILINE)[1].split()
    shares = [overlap.all, *overlap.kinds.values()]
    assert re.search(r"wanda – roi +" + " +".join(f"{100 * x:.1f}" for x in shares), printed.out)
    table = (out / "overlap.md").read_text()
    assert "| wanda – roi | " + " | ".join(f"{100 * x:.1f}" for x in shares) + " |" in table
    assert table.count("\n| model.layers") == len(mask_set(0).layers)
    for name in ("masks.png", "overlap_by_layer.png"):
        with Image.open(out / name) as image:
            image.load()
            assert all(600 < side < 4000 for side in image.size)


def test_running_again_replaces_and_leaves_the_rest(files, tmp_path):
    out = tmp_path / "out"
    assert run(*files[1:], "--out", out) == 0
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    (out / "notes.txt").write_text("mine")
    (out / "overlap.md").write_text("old")
    assert run(*files[1:], "--out", out) == 0
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before | {"notes.txt": b"mine"}


@pytest.mark.parametrize("build", [tiny_qwen2, tiny_gpt2])
def test_files_and_exported_directories_of_a_model(build, tmp_path, capsys):
    source = resolve_model(str(build(tmp_path / "base")))
    exported = write_export(source, random_masks(source, seed=1), tmp_path / "wanda")
    random_masks(source, seed=2).save(tmp_path / "roi" / "roi_mask.safetensors")
    shutil.copytree(exported, tmp_path / "copy")
    arguments = [exported, f"copy={tmp_path / 'copy'}", tmp_path / "roi" / "roi_mask.safetensors"]
    capsys.readouterr()
    assert run(*arguments, "--out", tmp_path / "out") == 0
    result = json.loads((tmp_path / "out" / "overlap.json").read_text())
    assert list(result["masks"]) == ["wanda", "copy", "roi"]
    assert result["overlap"][0]["all"] == 1
    expected = random_masks(source, seed=1).overlap(random_masks(source, seed=2))
    assert result["overlap"][1]["layers"] == result["overlap"][2]["layers"] == expected.layers
    assert set(expected.kinds) <= set((tmp_path / "out" / "overlap.md").read_text().split())
    assert not capsys.readouterr().err


def test_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in ("a/export", "b/export", "x=y"):
        (tmp_path / folder).mkdir(parents=True)
    label = compare.name_masks
    assert label(["a/export", "b/m.safetensors"]) == {"export": "a/export", "m": "b/m.safetensors"}
    assert label(["a/export", "b/export", "c/roi_mask.safetensors"]) == {
        "a/export": "a/export",
        "b/export": "b/export",
        "c": "c/roi_mask.safetensors",
    }
    assert label(["x=y", "x=z", "./a=b"]) == {"x=y": "x=y", "x": "z", "a=b": "./a=b"}
    with pytest.raises(UserError, match="two masks are called 'n'"):
        label(["n=a", "n=b"])
    with pytest.raises(UserError, match="two masks are called 'a/export'"):
        label(["a/export", "a/export"])


def test_the_reference_by_name_and_path(files, tmp_path, capsys):
    for wanted in ("wanda", files[1]):
        assert run(*files, "--out", tmp_path / "out", "--reference", wanted) == 0
        assert json.loads((tmp_path / "out" / "overlap.json").read_text())["reference"] == "wanda"
    assert "## By layer, with wanda" in (tmp_path / "out" / "overlap.md").read_text()
    assert run(*files, "--out", tmp_path / "none", "--reference", "wand") == 1
    assert "'magnitude', 'wanda', 'roi'" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


def test_masks_of_another_base_are_compared_with_a_warning(files, tmp_path, capsys):
    mask_set(5, base="other/model").save(tmp_path / "other.safetensors")
    assert run(files[0], tmp_path / "other.safetensors", "--out", tmp_path / "out") == 0
    assert "warning: masks of different base models" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (mask_set(0, "4:8"), "different patterns"),
        (mask_set(0, shapes=names_of(QWEN, 3, "model.layers")), "different models"),
        (mask_set(0, shapes=names_of(QWEN | {"mlp.up_proj": (24, 32)}, 4, "model.layers")), r"mlp\.up_proj"),
    ],
    ids=["pattern", "layers", "shapes"],
)
def test_what_can_not_be_compared_is_refused_and_nothing_is_written(files, tmp_path, other, reason, capsys):
    other.save(tmp_path / "other.safetensors")
    assert run(*files, tmp_path / "other.safetensors", "--out", tmp_path / "out") == 1
    error = capsys.readouterr().err
    assert re.search(reason, error)
    assert "'other'" in error
    assert not (tmp_path / "out").exists()


def test_bad_command_lines(files, tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        run(files[0], "--out", tmp_path / "out")
    assert stop.value.code == 2
    assert "required: MASK" in capsys.readouterr().err
    assert run(files[0], tmp_path / "absent", "--out", tmp_path / "out") == 1
    assert capsys.readouterr().err.count("\n") == 1
    assert run(*files, "--out", tmp_path / "out", "--layers", "nothing_like_it") == 1
    assert run(*files, "--out", files[0]) == 1
    assert "is a file" in capsys.readouterr().err
    assert run(*files, "--out", tmp_path / "out", "--json", tmp_path) == 1
    assert not (tmp_path / "out").exists()


def test_a_full_disk_leaves_what_was_there(files, tmp_path, monkeypatch):
    out = tmp_path / "out"
    assert run(*files[:2], "--out", out) == 0
    before = {path.name: path.read_bytes() for path in out.iterdir()}

    def full(handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    assert run(*files[1:], "--out", out) == 1
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


def test_chosen_layers_are_drawn(files, tmp_path, monkeypatch):
    drawn = []
    original = pictures.mask_figure
    monkeypatch.setattr(pictures, "mask_figure", lambda *a: drawn.append(a[2]) or original(*a))
    assert run(*files, "--out", tmp_path / "out", "--layers", "0.mlp.down_proj", "3.*.q_proj") == 0
    assert drawn == [["model.layers.0.mlp.down_proj.weight", "model.layers.3.self_attn.q_proj.weight"]]


def test_labels_are_safe_in_markdown_and_pictures(files, tmp_path):
    assert (
        run(f"a|b $x$={files[0]}", f"[red]<b>={files[1]}", f"漢字={files[2]}", "--out", tmp_path / "out") == 0
    )
    text = (tmp_path / "out" / "overlap.md").read_text()
    assert r"| a\|b \$x\$ – \[red\]\<b\> |" in text


@pytest.mark.slow
def test_only_pictures_come_with_matplotlib(files, tmp_path):
    probe = (
        "import sys, roi_lightning.masks.mask_set, roi_lightning.cli.compare as c, roi_lightning.__main__;"
        "assert 'matplotlib' not in sys.modules; c.main(sys.argv[1:]);"
        "assert 'matplotlib.pyplot' not in sys.modules"
    )
    fresh = {"MPLCONFIGDIR": str(tmp_path / "config"), "PATH": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", probe, *files[:2], "--out", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, env=fresh)
    assert done.returncode == 0, done.stderr
    assert "font" not in done.stdout + done.stderr
