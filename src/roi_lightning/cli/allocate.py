"""`allocate LM --budget N:M --out FILE`: a pattern for each layer, by what pruning it alone costs."""

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import yaml
from torch import nn

from roi_lightning.cli.calibration import calibration_data, titles
from roi_lightning.cli.options import parse_options
from roi_lightning.errors import UserError, check_at_least
from roi_lightning.learning.sensitivity import layer_costs
from roi_lightning.masks.layer_patterns import DENSE, LayerPatterns
from roi_lightning.masks.overlap import kind_of
from roi_lightning.masks.pattern import NMPattern
from roi_lightning.models.config import DType, load_config, max_positions
from roi_lightning.models.freezing import meta_language_model
from roi_lightning.models.layers import checked_layers, input_dim
from roi_lightning.models.loading import load_language_model
from roi_lightning.models.source import ModelSource, resolve_model
from roi_lightning.oneshot import calibration_windows
from roi_lightning.oneshot.allocation import Choice, LayerChoices, choose
from roi_lightning.utils.atomic_io import check_writable, written_aside
from roi_lightning.utils.devices import choose_device
from roi_lightning.utils.tables import print_table

Layers = dict[str, LayerChoices]


@dataclass(frozen=True, kw_only=True)
class AllocateOptions:
    """Give each layer the pattern that costs the model least, at a total of kept weights.

    Measures for every layer and choice how far the model's next-token distribution moves when that layer alone is
    pruned (by Wanda), takes the choices with the least sum that keep no more weights than the budget, and writes them
    as an overlay for fit, which prune --patterns reads too.

    Attributes:
        lm: Hub id, directory, or GGUF file.
        out: The .yaml file to write.
        overwrite: Replace a file that is there.
        budget: N:M; in total no more weights are kept than if all layers had it.
        choices: What a layer may have, as 1:4,2:4,3:4,dense.
        corpora: Text, as in data.corpora: files, globs, hub ids, python-docs, self, or mappings like
            '{source: x.jsonl, text_field: body}'.
        windows: How many windows of it; the time is proportional to their number.
        seq_len: Tokens of each.
        seed: Of the choice of windows.
        targets: Names or globs of the layers to choose for.
        ignore: Names or globs of layers to leave alone, which then count for nothing.
        revision: Branch, tag or commit of a hub id.
        dtype: In which the model runs: auto for the stored one, bfloat16 for GGUF; float32 measures small costs best.
        device: auto, cpu, cuda or cuda:N.
        trust_remote_code: Run the model repository's code.

    Raises:
        UserError: For patterns that can't be read, numbers out of range, and a file that is there already.
    """

    lm: str = field(kw_only=False)
    out: Path
    overwrite: bool = False
    budget: str = "2:4"
    choices: str = "1:4,2:4,3:4,dense"
    corpora: Sequence[str] = ("python-docs",)
    windows: int = 4
    seq_len: int = 512
    seed: int = 0
    targets: Sequence[str] = ("*",)
    ignore: Sequence[str] = ()
    revision: str | None = None
    dtype: DType = "auto"
    device: str = "auto"
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        check_at_least(self, windows=1, seq_len=2, seed=0)
        if self.out.suffix not in (".yaml", ".yml"):
            raise UserError(f"--out {str(self.out)!r} is to be an overlay; give a name that ends in .yaml")
        if self.out.exists() and not self.overwrite:
            raise UserError(
                f"{str(self.out)!r} is there already; give another --out, or --overwrite to replace it"
            )
        check_writable(self.out)
        _ = self.pattern, self.parsed_choices

    @cached_property
    def pattern(self) -> NMPattern:
        """Of the budget."""
        return NMPattern(self.budget)

    @cached_property
    def parsed_choices(self) -> list[Choice]:
        """The sparsest first, dense last."""
        texts = [text.strip() for text in self.choices.split(",")]
        patterns = {NMPattern(text) for text in texts if text != DENSE}
        dense: list[Choice] = [None] if DENSE in texts else []
        if not patterns:
            raise UserError(
                f"--choices {self.choices} holds no N:M; give some, for example 1:4,2:4,3:4,dense"
            )
        return [*sorted(patterns, key=lambda pattern: (pattern.n / pattern.m, pattern.m)), *dense]


def main(argv: Sequence[str]) -> int:
    """Measure, choose, write, and say what was chosen.

    Returns:
        0.

    Raises:
        UserError: For a budget that can't be kept to, and anything that can't be read, measured or written.
    """
    options = parse_options(AllocateOptions, "allocate", argv)
    source = resolve_model(options.lm, options.revision)
    layers = _layers(options, source)
    budget = sum(layer.kept(options.pattern) for layer in layers.values())
    free = {name: dict.fromkeys(layer.choices, 0.0) for name, layer in layers.items()}
    choose(layers, free, budget)  # so that a budget that is too small is refused before anything is read
    longest = max_positions(load_config(source, options.trust_remote_code))
    device = choose_device(options.device)
    data = calibration_data(source, options, device, options.trust_remote_code)
    windows = calibration_windows(data, options.windows, longest)
    lm = load_language_model(source, options.dtype, options.trust_remote_code, device=device)
    lm.to(device)  # type: ignore[arg-type]  # transformers' wrapper has no types
    patterns = {name: [c for c in layer.choices if c is not None] for name, layer in layers.items()}
    measured = layer_costs(lm, {name: lm.get_submodule(name) for name in layers}, patterns, windows)
    costs = {name: dict[Choice, float](own.items()) | {None: 0.0} for name, own in measured.items()}
    chosen = choose(layers, costs, budget)
    _write(options, layers, chosen, titles(data))
    _show(options, layers, chosen, costs)
    sys.stdout.write(f"{options.out}: for fit --config, or prune --patterns\n")
    return 0


def _layers(options: AllocateOptions, source: ModelSource) -> Layers:
    lm = meta_language_model(load_config(source, options.trust_remote_code), options.trust_remote_code)
    found = checked_layers(source.spec, lm, options.pattern, options.targets, options.ignore).pruned
    return {
        name: LayerChoices(layer.weight.numel(), _fitting(options, name, layer))
        for name, layer in found.items()
    }


def _fitting(options: AllocateOptions, name: str, layer: nn.Module) -> list[Choice]:
    """The choices whose M divides a layer's inputs."""
    inputs = layer.get_parameter("weight").shape[input_dim(layer)]
    fitting = [choice for choice in options.parsed_choices if choice is None or inputs % choice.m == 0]
    if not fitting:
        raise UserError(
            f"--choices {options.choices}: {name} has {inputs} inputs, which no M divides; add {DENSE}"
        )
    return fitting


def _write(options: AllocateOptions, layers: Layers, chosen: dict[str, Choice], text: str) -> None:
    patterns = LayerPatterns(chosen)
    kept, prunable = _total(layers, chosen)
    lines = (
        f"Mixed patterns of {options.lm}: {patterns}.",
        f"They keep {kept:,} of {prunable:,} prunable weights ({kept / prunable:.2%}), at most {options.budget}.",
        f"Chosen by what pruning each layer alone costs on {options.windows} windows of {options.seq_len} tokens of",
        f"{text}.",
        f"  roi-lightning fit --config quickstart.yaml --lm {options.lm} --config {options.out}",
        f"  roi-lightning prune {options.lm} --method wanda --patterns {options.out} --out DIR",
    )
    header = "".join(f"# {line}\n" for line in lines)
    overlay = {"model": {"init_args": {"patterns": patterns.spelled()}}}
    with written_aside(options.out) as partial:
        partial.write_text(header + yaml.safe_dump(overlay, sort_keys=False), encoding="utf-8")


def _total(layers: Layers, chosen: dict[str, Choice]) -> tuple[int, int]:
    """How many weights stay, of how many."""
    kept = sum(layer.kept(chosen[name]) for name, layer in layers.items())
    return kept, sum(layer.weights for layer in layers.values())


def _show(
    options: AllocateOptions,
    layers: Layers,
    chosen: dict[str, Choice],
    costs: dict[str, dict[Choice, float]],
) -> None:
    choices = [choice for choice in options.parsed_choices if choice in chosen.values()]
    head = ["kind of layer", *(f"{choice or DENSE}" for choice in choices), "kept", "divergence"]
    uniform: Choice = options.pattern
    has_uniform = all(uniform in own for own in costs.values())

    def row(label: str, names: Sequence[str]) -> list[str]:
        own = {name: chosen[name] for name in names}
        kept, total = _total({name: layers[name] for name in names}, own)
        counts = Counter(own.values())
        cost = sum(costs[name][choice] for name, choice in own.items())
        before = [f"{sum(costs[name][uniform] for name in names):.4f}"] if has_uniform else []
        cells = [*(str(counts[choice] or "") for choice in choices), f"{kept / total:.1%}", f"{cost:.4f}"]
        return [label, *cells, *before]

    kinds: dict[str, list[str]] = {}
    for name in layers:
        kinds.setdefault(kind_of(name), []).append(name)
    rows = [*(row(kind, names) for kind, names in kinds.items()), None, row("all", list(layers))]
    kept, prunable = _total(layers, chosen)
    uniform_head = [f"all at {options.budget}"] if has_uniform else []
    print_table([*head, *uniform_head], rows, f"{options.lm} within {options.budget}")
    sys.stdout.write(
        f"{kept:,} of {prunable:,} weights kept ({kept / prunable:.2%}), mixed patterns; {options.budget} keeps "
        f"{sum(layer.kept(options.pattern) for layer in layers.values()):,}\n"
    )
    sys.stdout.write(
        "divergence: sum over layers of KL(dense ‖ that layer alone pruned), nats per token; layers pruned together "
        "cost more or less than that\n"
    )
