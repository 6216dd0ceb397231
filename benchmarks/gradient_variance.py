"""How much the gradient varies from draw to draw: a logit per weight (RoI) against one per candidate (MaskLLM).

    python benchmarks/gradient_variance.py --roi_data FOLDER --json gradient_variance.json --markdown F.md

Nothing is learned: the logits stay where they are. Both samplers have the same frozen model, text, temperatures and
logits φ of weights, a candidate's logit being the sum of its members' φ, so that both think the same mask likeliest.
Such candidate logits are a linear map A of φ; Aᵀ takes their gradient to the weights, where it is what shared
logits would get from MaskLLM's distribution. FOLDER holds `corpus/openstax_train.jsonl.gz`.
"""

import argparse
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from transformers.modeling_utils import PreTrainedModel

from roi_lightning.data import CalibrationDataModule
from roi_lightning.learning.losses import objective
from roi_lightning.learning.priors import ONE_SHOT_PRIORS
from roi_lightning.masks.pattern import NMPattern
from roi_lightning.models.layers import prunable_layers
from roi_lightning.models.loading import load_language_model
from roi_lightning.models.source import resolve_model
from roi_lightning.oneshot import Calibration, prune_layers
from roi_lightning.samplers import Categorical, Draw, GumbelTopK, Sampler
from roi_lightning.samplers.categorical_eager import candidates
from roi_lightning.samplers.masked_linear import SharedState, SparseLinear, attach
from roi_lightning.utils.atomic_io import write_json, written_aside
from roi_lightning.utils.progress import progress
from roi_lightning.utils.tables import markdown_table

PRIOR_WINDOWS: Final = 16
PULLED_BACK: Final = "MaskLLM, to weights"


@dataclass(frozen=True)
class Setting:
    """Where the logits are and how warm the draws.

    Attributes:
        name: In the table.
        lam: λ.
        tau: τ.
        strength: What φ has more where the prior keeps a weight, less where it does not; 0 for no prior.
        std: Of φ's random part.
    """

    name: str
    lam: float
    tau: float
    strength: float = 0.015
    std: float = 0.003


# A run's logits have moved by its middle: where they start, nothing would be undecided at such temperatures. Random
# parts of 0.01 flip 3 % of the prior's choices, as 300 steps do.
SETTINGS: Final = (
    Setting("the paper's start", 1.0, 1.0, strength=0.0, std=0.01),
    Setting("small budget, start", 0.005, 0.2),
    Setting("small budget, middle", 0.0035, 0.125, std=0.01),
    Setting("small budget, end", 0.002, 0.05, std=0.01),
)


@dataclass(frozen=True)
class Text:
    """What the draws of one text say of the gradient.

    Attributes:
        noise: Unbiased E‖g - ḡ‖².
        signal: Unbiased ‖ḡ‖², which chance may take below 0.
        cosine: Mean over pairs of draws.
        layer_cosine: The same of each layer, its median over layers.
    """

    noise: float
    signal: float
    cosine: float
    layer_cosine: float


def text_of(products: Tensor) -> Text:
    """The estimates from the inner products of the gradients of some draws.

    Args:
        products: fp64 [layers, draws, draws], at least two draws.
    """
    draws = products.shape[-1]
    whole = products.sum(0)
    square, signal = float(whole.trace()) / draws, _mean_of_pairs(whole)
    return Text(square - signal, signal, _cosine(whole), statistics.median(map(_cosine, products)))


def _mean_of_pairs(products: Tensor) -> float:
    draws = len(products)
    return float(products.sum() - products.trace()) / (draws * (draws - 1))


def _cosine(products: Tensor) -> float:
    norms = products.diagonal().sqrt()
    return _mean_of_pairs(products / torch.outer(norms, norms))


def inner_products(gradients: Sequence[Sequence[Tensor]]) -> Tensor:
    """fp64 [layers, draws, draws].

    Args:
        gradients: Of every draw, by layer.
    """
    layers = (torch.stack([x.flatten().double() for x in draws]) for draws in zip(*gradients, strict=True))
    return torch.stack([flat @ flat.T for flat in layers])


def membership(pattern: NMPattern) -> Tensor:
    """A: fp32 [candidates, M], 1 where a candidate keeps an element."""
    kept = candidates(pattern.n, pattern.m, torch.device("cpu"))
    return torch.zeros(len(kept), pattern.m).scatter_(1, kept, 1.0)


def to_candidates(phi: Tensor, pattern: NMPattern) -> Tensor:
    """A φ: [out, in] → [candidates, out, in/M]."""
    return torch.einsum("cm,ogm->cog", membership(pattern), pattern.group(phi))


def to_weights(gradient: Tensor, pattern: NMPattern) -> Tensor:
    """Aᵀ g: [candidates, out, in/M] → [out, in]."""
    return torch.einsum("cm,cog->ogm", membership(pattern), gradient).flatten(-2)


def samplers(pattern: NMPattern) -> dict[str, Sampler]:
    """What is compared; RoI with the other recursion too, where that is the recommended one."""
    roi = GumbelTopK()
    scaled = {"RoI, scaled": GumbelTopK(push_down="scaled")} if roi.advice(pattern) else {}
    return {"RoI": roi, **scaled, "MaskLLM": Categorical()}


class Bench:
    """A frozen model and its prior masks.

    Args:
        lm: The model.
        prior_text: Windows that the activation prior is measured on, int64 [count, seq_len].
        patterns: All that will be asked for.
        seed: Of logits and draws.
    """

    def __init__(
        self, lm: PreTrainedModel, prior_text: Tensor, patterns: Sequence[NMPattern], seed: int = 0
    ) -> None:
        self.lm, self.seed, self.dense = lm, seed, prunable_layers(lm)
        method, activations = ONE_SHOT_PRIORS["activation"]
        text = Calibration(prior_text, activations)
        self.priors = {
            pattern: {name: x.mask for name, x in prune_layers(lm, self.dense, method, pattern, text)}
            for pattern in patterns
        }

    def measure(
        self, pattern: NMPattern, setting: Setting, sampler: Sampler, texts: Sequence[Tensor], draws: int
    ) -> dict[str, Any]:
        """The gradient of some draws for each text.

        Args:
            pattern: N:M.
            setting: Logits and temperatures.
            sampler: What draws.
            texts: Token ids, int64 [batch, seq_len] each.
            draws: Masks drawn for each text, at least 2; no two draws are alike.

        Returns:
            `own`, a `Text` for each text; `pulled_back`, the same after Aᵀ, if the logits are of candidates; the mean
            `loss`; `kept`, the share of the likeliest mask that a draw keeps, by the first draw of each text.
        """
        state = SharedState(pattern, "sample", sampler=sampler)
        layers = attach(self.lm, self.dense, state, SparseLinear)
        self._set_logits(layers, setting)
        own, pulled_back, losses, kept = [], [], [], []
        for i, ids in enumerate(texts):
            gradients = []
            for k in range(draws):
                state.draw = draw = Draw(self.seed, i * draws + k, setting.lam, setting.tau)
                loss, _ = objective(self.lm, ids, 0.0, nullcontext())
                gradients.append(torch.autograd.grad(loss, [layer.logits for layer in layers.values()]))
                losses.append(float(loss.detach()))
            own.append(text_of(inner_products(gradients)))
            kept.append(_share_kept(layers.values(), draw))
            if isinstance(sampler, Categorical):
                in_weights = [[to_weights(x, pattern) for x in gradient] for gradient in gradients]
                pulled_back.append(text_of(inner_products(in_weights)))
            del gradients
        return {
            "own": own,
            "pulled_back": pulled_back,
            "loss": statistics.mean(losses),
            "kept": statistics.mean(kept),
        }

    @torch.no_grad()
    def _set_logits(self, layers: Mapping[str, SparseLinear], setting: Setting) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        for name, layer in layers.items():
            pattern, prior = layer.state.pattern, self.priors[layer.state.pattern][name]
            phi = torch.randn(layer.weight.shape, generator=generator) * setting.std
            phi += torch.where(prior, setting.strength, -setting.strength)
            of_candidates = isinstance(layer.state.sampler, Categorical)
            layer.logits.copy_(to_candidates(phi, pattern) if of_candidates else phi)


@torch.no_grad()
def _share_kept(layers: Iterable[SparseLinear], draw: Draw) -> float:
    kept = whole = 0.0
    for layer in layers:
        state, likeliest = layer.state, layer.hard_mask()
        ones = torch.ones_like(layer.weight)
        mask = state.sampler.masked_weight(ones, layer.logits, state.pattern, draw, layer.name)
        kept += float(mask[likeliest].double().sum())
        whole += float(likeliest.sum())
    return kept / whole


def relative_variance(texts: Sequence[Text]) -> float:
    """E‖g - ḡ‖² ÷ ‖ḡ‖² of one draw: the draws to average until the noise is no larger than the signal."""
    return sum(text.noise for text in texts) / sum(text.signal for text in texts)


def with_error(statistic: Callable[[list[int]], float], count: int) -> tuple[float, float]:
    """A statistic of some texts, and its jackknife standard error.

    Args:
        statistic: Of the texts of these numbers.
        count: How many texts there are, at least 2.
    """
    everything = list(range(count))
    without = [statistic([j for j in everything if j != i]) for i in everything]
    mean = statistics.mean(without)
    return statistic(everything), ((count - 1) / count * sum((x - mean) ** 2 for x in without)) ** 0.5


def summarise(texts: Sequence[Text], base: Sequence[Text]) -> dict[str, Any]:
    """Figures of a row, pairs with standard errors over texts.

    Args:
        texts: The row's.
        base: RoI's, of the same texts.
    """

    def relative(own: Sequence[Text]) -> Callable[[list[int]], float]:
        return lambda chosen: relative_variance([own[i] for i in chosen])

    count, ours, roi = len(texts), relative(texts), relative(base)
    return {
        "relative_variance": with_error(ours, count),
        "over_roi": with_error(lambda chosen: ours(chosen) / roi(chosen), count),
        "cosine": with_error(lambda chosen: statistics.mean(texts[i].cosine for i in chosen), count),
        "layer_cosine": statistics.mean(text.layer_cosine for text in texts),
        "texts": [asdict(text) for text in texts],
    }


def rows_of(found: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """The rows of a pattern and setting, by name.

    Args:
        found: What `Bench.measure` returned, by the samplers' names, RoI's first.
    """
    base, rows = next(iter(found.values()))["own"], {}
    for name, part in found.items():
        shared = {"loss": part["loss"], "kept": part["kept"]}
        rows[name] = summarise(part["own"], base) | shared
        if part["pulled_back"]:
            rows[PULLED_BACK] = summarise(part["pulled_back"], base) | shared
    return rows


def as_markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """The table."""
    head = ["pattern", "setting", "λ", "τ", "gradient of", "relative variance", "÷ RoI's", "cosine"]
    cells = [
        [
            row["pattern"],
            row["setting"],
            f"{row['lam']:g}",
            f"{row['tau']:g}",
            row["name"],
            _spelled(row["relative_variance"]),
            "" if row["name"] == "RoI" else _spelled(row["over_roi"]),
            _spelled(row["cosine"]),
            f"{row['layer_cosine']:.3f}",
            f"{row['kept']:.1%}",
            f"{row['loss']:.2f}",
        ]
        for row in rows
    ]
    return markdown_table([*head, "median layer's", "likeliest kept", "loss"], cells, left=5) + "\n"


def _spelled(pair: Sequence[float]) -> str:
    figure, error = pair
    decimals = 3 if error == 0 else min(max(-math.floor(math.log10(error)), 0), 6)
    return f"{figure:,.{decimals}f} ± {error:,.{decimals}f}"


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--roi_data", metavar="FOLDER", type=Path, required=True)
    parser.add_argument("--lm", default="smollm2-135m")
    parser.add_argument("--patterns", default="2:4,2:8")
    parser.add_argument("--texts", type=int, default=4, help="batches, at least 2 (default: %(default)s)")
    parser.add_argument("--draws", type=int, default=4, help="per text, at least 2 (default: %(default)s)")
    parser.add_argument("--batch_size", type=int, default=2, help="windows of a text (default: %(default)s)")
    parser.add_argument("--seq_len", type=int, default=512, help="tokens of each (default: %(default)s)")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    args = parser.parse_args(argv)
    patterns = [NMPattern(spec) for spec in args.patterns.split(",")]
    source = resolve_model(args.lm)
    data = CalibrationDataModule(
        args.lm, corpora=str(args.roi_data / "corpus/openstax_train.jsonl.gz"), seq_len=args.seq_len
    )
    windows = data.windows("train", PRIOR_WINDOWS + args.texts * args.batch_size)
    texts = windows[PRIOR_WINDOWS:].split(args.batch_size)
    lm = load_language_model(source, device=torch.device("cpu"))
    bench = Bench(lm, windows[:PRIOR_WINDOWS], patterns)
    cells = [(p, s, name) for p in patterns for s in SETTINGS for name in samplers(p)]
    found: dict[tuple[NMPattern, Setting], dict[str, Any]] = {}
    rows: list[dict[str, Any]] = []
    for pattern, setting, name in progress(cells, "samplers"):
        part = bench.measure(pattern, setting, samplers(pattern)[name], texts, args.draws)
        found.setdefault((pattern, setting), {})[name] = part
        rows = [
            {"pattern": str(p), "setting": s.name, "lam": s.lam, "tau": s.tau, "name": label, **row}
            for (p, s), parts in found.items()
            for label, row in rows_of(parts).items()
        ]
        if args.json:  # so far: an hour's work is not lost with its last minute
            settings = {
                name: getattr(args, name) for name in ("lm", "texts", "draws", "batch_size", "seq_len")
            }
            write_json(args.json, {"settings": settings, "rows": rows})
    print(as_markdown(rows))
    if args.markdown:
        with written_aside(args.markdown) as partial_file:
            partial_file.write_text(as_markdown(rows))


if __name__ == "__main__":
    main()
