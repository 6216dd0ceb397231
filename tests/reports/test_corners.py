"""The corners of masks in a figure: cells, words, and layout."""

import pytest

from helpers.mask_sets import GPT2, QWEN, mask_set, names_of
from roi_lightning.masks.overlap import shown_layers
from roi_lightning.reports.corners import mask_figure, piece


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("shape", "columns"), [((12, 32), 8), ((12, 32), 16), ((3, 4), 8), ((9, 12), 12)])
def test_the_corner_is_that_of_the_mask(shape, columns, transposed):
    layer = mask_set(0, shapes={"h.0.a.weight": shape}, transposed=transposed).layers["h.0.a.weight"]
    bools = layer.to_bool().T if transposed else layer.to_bool()
    assert piece(layer, columns).tolist() == bools[:8, :columns].tolist()
    assert piece(layer, columns, 8, 8).tolist() == bools[8:16, 8 : 8 + columns].tolist()


def panels(figure):
    """(row, column) → axes."""
    return {tuple(map(int, axes.get_label().split(","))): axes for axes in figure.axes}


@pytest.mark.parametrize(("pattern", "columns"), [("2:4", 8), ("4:16", 16)])
def test_panels_show_the_masks_and_their_overlap(pattern, columns):
    masks = {name: mask_set(i, pattern) for i, name in enumerate(("one", "two", "three"))}
    layers = shown_layers(list(masks["one"].layers))
    figure = mask_figure(masks, "two", layers)
    drawn = panels(figure)
    assert len(drawn) == 9
    for (row, column), axes in drawn.items():
        label, name = list(masks)[column], layers[row]
        kept = masks[label].layers[name].to_bool()
        assert axes.images[0].get_array().tolist() == kept[:8, :columns].tolist()
        title, last = axes.get_title().split("\n")
        share = masks[label].overlap(masks["two"]).layers[name]
        assert title == label
        assert last == ("reference" if label == "two" else f"{100 * share:.1f} %")
    assert pattern in figure.texts[0].get_text()


def test_pieces_are_where_masks_differ_most():
    masks, name = {"before": mask_set(0), "learned": mask_set(0)}, "model.layers.1.mlp.up_proj.weight"
    changed = masks["learned"].layers[name].packed
    changed[2, 0] ^= 0b11
    changed[9, 1] ^= 0b11001
    drawn = panels(mask_figure(masks, "before", [name], changed=True))
    for axes, mask in zip(drawn.values(), masks.values(), strict=True):
        assert axes.images[0].get_array().tolist() == mask.layers[name].to_bool()[8:16, 8:16].tolist()
    assert drawn[0, 0].get_ylabel().startswith("row 8, column 8")
    dots = [axes.collections[-1].get_offsets().tolist() for axes in drawn.values()]
    assert dots == [[], [[0.5, 1.5], [3.5, 1.5], [4.5, 1.5]]]


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
    figure = mask_figure(masks, labels[-1], layers)
    figure.draw_without_rendering()
    texts = [*figure.texts, *(text for axes in figure.axes for text in (axes.title, axes.yaxis.label))]
    boxes = [text.get_window_extent() for text in texts if text.get_text()]
    page = figure.bbox
    for i, box in enumerate(boxes):
        assert page.x0 <= box.x0 <= box.x1 <= page.x1
        assert page.y0 <= box.y0 <= box.y1 <= page.y1
        assert not any(box.overlaps(other) for other in boxes[:i])


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
