"""How far every mask agrees with a reference, block by block."""

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from roi_lightning.masks.overlap import Overlap, place_of
from roi_lightning.plots.layout import (
    DASHED,
    INK,
    NAME,
    line_style,
    own_style,
    percent,
    style_axes,
    titled_figure,
    wrap,
)


def layer_figure(overlaps: Mapping[str, Overlap], reference: str, chance: float) -> Figure:
    """Draw the overlap with the reference along the depth of the model, a panel per kind of layer.

    Args:
        overlaps: Of every other mask with the reference, by the mask's name.
        reference: The reference's name.
        chance: What two unrelated masks share, N/M; drawn as a dashed line.
    """
    series = {label: by_place(overlap) for label, overlap in overlaps.items()}
    places = list(next(iter(series.values())))
    across = min(4, len(places))
    down = -(-len(places) // across)
    labels = [*(wrap(label, 24, 3) for label in series), "by chance"]
    handles = [*(Line2D([], [], **line_style(i, 1)) for i in range(len(series))), Line2D([], [], **DASHED)]
    note = (
        "Of the weights that the reference keeps, those that another mask keeps too. "
        f"Dashed: what chance gives, {percent(chance)}."
    )
    with own_style():
        height = max(2.4 * down, 0.15 * "\n".join(labels).count("\n") + 0.09 * len(labels) + 0.5)
        title = f"Overlap with {wrap(reference, 60, 1)} by block"
        figure = titled_figure(title, note, 2.6 * across + 2.6, height)
        first = None
        for i, place in enumerate(places):
            axes = first = figure.add_subplot(down, across, i + 1, label=place, sharex=first, sharey=first)
            _draw(axes, [by_block[place] for by_block in series.values()], chance)
            axes.set_title(wrap(place, 30, 1), color=INK, **NAME)
            style_axes(axes, "block" if i + across >= len(places) else "", "" if i % across else "overlap, %")
            axes.tick_params(labelleft=i % across == 0)
        figure.legend(handles, labels, loc="outside right center", frameon=False, prop=NAME, labelcolor=INK)
    return figure


def _draw(axes: Axes, shares: Sequence[Mapping[int, float]], chance: float) -> None:
    """Draw each mask's overlap by block, in percent."""
    axes.axhline(100 * chance, **DASHED)
    for i, by_block in enumerate(shares):
        values = [100 * share for share in by_block.values()]
        axes.plot(list(by_block), values, **line_style(i, len(by_block)))
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True, min_n_ticks=1))


def by_place(overlap: Overlap) -> dict[str, dict[int, float]]:
    """Overlap by kind of layer and its place in a block, then by block.

    Layers that share a place (the experts of one block) are taken together. What all places begin with
    (`model.layers.`) is left out.

    Returns:
        `{"self_attn.q_proj": {0: 0.7, 1: 0.6, ...}, ...}`, each a share of the kept weights.
    """
    both: dict[tuple[str, int], int] = {}
    kept: dict[tuple[str, int], int] = {}
    for name, count in overlap.both.items():
        key = place_of(name)
        both[key] = both.get(key, 0) + count
        kept[key] = kept.get(key, 0) + overlap.kept[name]
    shared = _shared_prefix([place for place, _ in both])
    result: dict[str, dict[int, float]] = {}
    for place, block in sorted(both, key=lambda key: key[1]):
        result.setdefault(place[shared:], {})[block] = both[place, block] / kept[place, block]
    return result


def _shared_prefix(places: Sequence[str]) -> int:
    """The length of the dotted beginning that all places share, their last two parts aside."""
    heads = [place.split(".")[:-2] for place in places]
    shared = 0
    while all(len(head) > shared and head[shared] == heads[0][shared] for head in heads):
        shared += 1
    return len("".join(f"{part}." for part in heads[0][:shared]))
