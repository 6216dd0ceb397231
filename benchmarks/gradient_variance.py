"""How much the gradient varies from draw to draw: a logit per weight (RoI) against one per candidate (MaskLLM).

    python -m benchmarks.gradient_variance --roi_data FOLDER --json gradient_variance.json --markdown F.md

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
from dataclasses import dataclass
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

PRIOR_WINDOWS: Final = 32
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
    Setting("small budget, start", 0.005, 0.2),
    Setting("small budget, end", 0.002, 0.05, std=0.01),
    Setting("the paper's start", 1.0, 1.0, strength=0.0, std=0.01),
    Setting("small budget, middle", 0.0035, 0.125, std=0.01),
)


def inner_products(gradients: Sequence[Sequence[Tensor]]) -> Tensor:
    """fp32 [layers, draws, draws].

    Args:
        gradients: Of every draw, by layer.
    """
    layers = (torch.stack([x.flatten() for x in draws]).float() for draws in zip(*gradients, strict=True))
    return torch.stack([(flat @ flat.T).double() for flat in layers])


def signal(products: Tensor) -> Tensor:
    """Unbiased ‖ḡ‖², which chance may take below 0: the mean over pairs of draws.

    Args:
        products: [..., draws, draws], at least two draws.

    Returns:
        [...]
    """
    draws, squares = products.shape[-1], products.diagonal(dim1=-2, dim2=-1).sum(-1)
    return (products.sum((-2, -1)) - squares) / (draws * (draws - 1))


def noise(products: Tensor) -> Tensor:
    """Unbiased E‖g - ḡ‖² of one draw: [..., draws, draws] → [...]."""
    return products.diagonal(dim1=-2, dim2=-1).mean(-1) - signal(products)


def cosines(products: Tensor) -> Tensor:
    """Between the gradients of two draws, the mean over pairs: [..., draws, draws] → [...]."""
    norms = products.diagonal(dim1=-2, dim2=-1).sqrt()
    return signal(products / (norms.unsqueeze(-1) * norms.unsqueeze(-2)))


def relative_variance(products: Tensor) -> float:
    """E‖g - ḡ‖² ÷ ‖ḡ‖²: so many draws have to be averaged until the noise is no larger than the signal.

    Args:
        products: [texts, layers, draws, draws].
    """
    whole = products.sum(1)
    return float(noise(whole).sum() / signal(whole).sum())


def cosine(products: Tensor) -> float:
    """Between two draws' gradients; the largest of its numbers decide."""
    return float(cosines(products.sum(1)).mean())


def layer_cosine(products: Tensor) -> float:
    """The same for each layer by itself, and the median of that over layers."""
    return float(cosines(products).mean(0).median())


def with_error(statistic: Callable[[Tensor], float], products: Tensor) -> tuple[float, float]:
    """A statistic, and its jackknife standard error: every draw left out in turn.

    Args:
        statistic: Of inner products.
        products: [texts, layers, draws, draws], at least three draws.
    """
    draws = torch.arange(products.shape[-1])
    without = [statistic(products[..., draws != k, :][..., draws != k]) for k in draws]
    return statistic(products), ((len(draws) - 1) * statistics.pvariance(without)) ** 0.5


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
    scaled = {"RoI, scaled": GumbelTopK(push_down="scaled")} if roi.advice(pattern, tau=1.0) else {}
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
            draws: Masks drawn for each text, at least 3; no two draws are alike.

        Returns:
            `own`, the inner products for each text, [layers, draws, draws]; `pulled_back`, the same after Aᵀ, if the
            logits are of candidates; the mean `loss`; `kept`, the share of the likeliest mask that the last
            draw keeps.
        """
        state = SharedState(pattern, "sample", sampler=sampler)
        layers = attach(self.lm, self.dense, state, SparseLinear)
        logits = self._set_logits(layers, setting)
        own, pulled_back, losses = [], [], []
        for i, ids in enumerate(texts):
            gradients, in_weights = [], []
            for k in range(draws):
                state.draw = draw = Draw(self.seed, i * draws + k, setting.lam, setting.tau)
                loss, _ = objective(self.lm, ids, 0.0, nullcontext())
                gradient = torch.autograd.grad(loss, logits)
                losses.append(float(loss.detach()))
                # Kept in half the memory; it is the noise of rounding that is new, and that is small.
                gradients.append([x.bfloat16() for x in gradient])
                if isinstance(sampler, Categorical):
                    in_weights.append([to_weights(x, pattern).bfloat16() for x in gradient])
                del gradient
            own.append(inner_products(gradients))
            if in_weights:
                pulled_back.append(inner_products(in_weights))
        kept = _share_kept(layers.values(), draw)
        return {"own": own, "pulled_back": pulled_back, "loss": statistics.mean(losses), "kept": kept}

    @torch.no_grad()
    def _set_logits(self, layers: Mapping[str, SparseLinear], setting: Setting) -> list[Tensor]:
        generator = torch.Generator().manual_seed(self.seed)
        for name, layer in layers.items():
            pattern, prior = layer.pattern, self.priors[layer.pattern][name]
            phi = torch.randn(layer.weight.shape, generator=generator) * setting.std
            phi += torch.where(prior, setting.strength, -setting.strength)
            of_candidates = isinstance(layer.state.sampler, Categorical)
            layer.logits.copy_(to_candidates(phi, pattern) if of_candidates else phi)
        return [layer.logits for layer in layers.values()]


@torch.no_grad()
def _share_kept(layers: Iterable[SparseLinear], draw: Draw) -> float:
    kept = whole = 0.0
    for layer in layers:
        state, likeliest = layer.state, layer.hard_mask()
        ones = torch.ones_like(layer.weight)
        mask = state.sampler.masked_weight(ones, layer.logits, layer.pattern, draw, layer.name)
        kept += float(mask[likeliest].double().sum())
        whole += float(likeliest.sum())
    return kept / whole


def rows_of(found: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """The rows of a pattern and setting, by name.

    Args:
        found: What `Bench.measure` returned, by the samplers' names, RoI's first.
    """
    rows: dict[str, dict[str, Any]] = {}
    for name, part in found.items():
        shared = {"loss": part["loss"], "kept": part["kept"]}
        rows[name] = summarise(torch.stack(part["own"])) | shared
        if part["pulled_back"]:
            rows[PULLED_BACK] = summarise(torch.stack(part["pulled_back"])) | shared
    base = next(iter(rows.values()))["relative_variance"]
    for row in rows.values():
        row["over_roi"] = _ratio(row["relative_variance"], base)
    return rows


def summarise(products: Tensor) -> dict[str, Any]:
    """Figures of a row with their standard errors.

    Args:
        products: [texts, layers, draws, draws].
    """
    statistics_of_a_row = (relative_variance, cosine, layer_cosine)
    found: dict[str, Any] = {x.__name__: with_error(x, products) for x in statistics_of_a_row}
    return found | {"inner_products": products.sum(1).tolist()}


def _ratio(own: tuple[float, float], base: tuple[float, float]) -> tuple[float, float]:
    """Of independent figures."""
    ratio = own[0] / base[0]
    return ratio, abs(ratio) * math.hypot(own[1] / own[0], base[1] / base[0])


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
            _spelled(row["layer_cosine"]),
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
    parser.add_argument("--texts", type=int, default=1, help="batches (default: %(default)s)")
    parser.add_argument("--draws", type=int, default=16, help="per text, at least 3 (default: %(default)s)")
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
    cells = [(p, s, name) for s in SETTINGS for p in patterns for name in samplers(p)]
    found: dict[tuple[NMPattern, Setting], dict[str, Any]] = {}
    rows: list[dict[str, Any]] = []
    for pattern, setting, name in progress(cells, "samplers"):
        part = bench.measure(pattern, setting, samplers(pattern)[name], texts, args.draws)
        found.setdefault((pattern, setting), {})[name] = part
        rows = [
            {"pattern": str(p), "setting": s.name, "lam": s.lam, "tau": s.tau, "name": label, **row}
            for (p, s), parts in sorted(found.items(), key=lambda item: patterns.index(item[0][0]))
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
