"""What runs take on GPUs, in two Markdown tables of what `plan` counts: as configured, and with `recipes/gpu.yaml`.

    python benchmarks/plan_table.py                                  # every row, printed
    python benchmarks/plan_table.py qwen3_4b_2of4                    # of one configuration
    python benchmarks/plan_table.py --write docs/configurations.md   # between the page's markers

No model is fetched: `shapes.json` has the published sizes of each and its number of parameters.
"""

import argparse
import json
import re
import sys
import tempfile
from collections.abc import Sequence
from contextlib import redirect_stdout, suppress
from io import StringIO
from pathlib import Path
from typing import Any, Final

import yaml
from transformers import AutoConfig, PreTrainedConfig

from roi_lightning.cli.config_files import shipped_configs
from roi_lightning.cli.fit_in import USABLE, parse_size
from roi_lightning.cli.plan import main as plan_command
from roi_lightning.cli.plan import make_plan
from roi_lightning.errors import UserError

SHAPES: Final = Path(__file__).with_name("shapes.json")
_MARKED: Final = r"(?<=<!-- {} -->\n).*?(?=<!-- end -->)"
_CARDS: Final = ("24GB", "80GB", "141GB")
_RANKS: Final = (8, 16)
_HELD: Final = ("weights", "masked_weights", "logits", "gradients", "optimizer")
# In bf16, the masked weight and its gradient.
_OF_A_WEIGHT: Final = 2 + 2
_SMALL: Final = "overlays/one_24gb_gpu.yaml"
_HEAD: Final = (
    *("configuration", "weights", "logits", "steps", "tokens", "micro-batches on 1, 8, 16 GPUs"),
    *("GiB: one GPU, or DDP", "GiB: FSDP2 on 8", "on 16", "GiB: one_24gb_gpu"),
)
_GPU: Final = "recipes/gpu.yaml"
_GPU_CARDS: Final = ("24GB", "80GB")
_GPU_HEAD: Final = ("configuration", "GiB", *(f"add on a card of {card}" for card in _GPU_CARDS))


def shapes() -> dict[str, dict[str, Any]]:
    """The published number of `parameters` and the sizes of each model, by its hub id."""
    known: dict[str, dict[str, Any]] = json.loads(SHAPES.read_text())
    return known


def architecture(lm: str) -> PreTrainedConfig:
    """The configuration of a model in `shapes.json`."""
    sizes = {key: value for key, value in shapes()[lm].items() if key != "parameters"}
    config: PreTrainedConfig = AutoConfig.for_model(**sizes, dtype="bfloat16")
    return config


def published_count(lm: str) -> int:
    """How many parameters the model is published with."""
    count: int = shapes()[lm]["parameters"]
    return count


def configurations() -> dict[str, str]:
    """The hub ids of the shipped configurations that name one of `shapes.json`, by their names, in its order."""
    named = {}
    for file in shipped_configs().glob("*.yaml"):
        lm = yaml.safe_load(file.read_text())["model"]["init_args"].get("lm")
        named[lm] = file.stem
    return {named[lm]: lm for lm in shapes() if lm in named}


def row(name: str) -> list[str]:
    """The cells of a configuration.

    Args:
        name: Of a file in `configs/`, without `.yaml`.
    """
    lm = configurations()[name]
    with tempfile.TemporaryDirectory() as folder:
        config = architecture(lm)
        config.save_pretrained(folder)
        plan, small = (_plan(name, folder, *more) for more in ([], ["--config", _SMALL]))
    sizes = plan["bytes"]
    held = sum(sizes[part] for part in _HELD)
    # Sharded, the two models share nothing.
    divided = held + sizes["weights"] - sizes["masked_weights"]
    gathered = _gathered(config, plan["prunable"])
    sharded = [sizes["total"] - held + divided // ranks + gathered for ranks in _RANKS]
    per_device = [plan["micro_batches"] // ranks for ranks in (1, *_RANKS)]
    return [
        f"`{name}`",
        _millions(published_count(lm)),
        _millions(plan["logits"]),
        f"{plan['steps']:,}",
        f"{plan['tokens'] / 1e9:.2f} B",
        ", ".join(map(str, per_device)),
        *map(_with_card, (sizes["total"], *sharded, small["bytes"]["total"])),
    ]


def gpu_row(name: str) -> list[str]:
    """The cells of a configuration under `recipes/gpu.yaml`: what it takes, and what makes it fit.

    Args:
        name: Of a file in `configs/`, without `.yaml`.
    """
    with tempfile.TemporaryDirectory() as folder:
        architecture(configurations()[name]).save_pretrained(folder)
        plans = [_fitted(name, folder, card) for card in _GPU_CARDS]
    cells = (plan["fit_in"]["arguments"] for plan in plans)
    added = [
        "no setting fits" if words is None else f"`{' '.join(words)}`" if words else "" for words in cells
    ]
    return [f"`{name}`", f"{plans[0]['bytes']['total'] / 2**30:.1f}", *added]


def _fitted(name: str, folder: str, card: str) -> dict[str, Any]:
    """What `plan --fit_in` writes, whether or not anything fits."""
    out = Path(folder) / "plan.json"
    words = _words(name, folder, "--config", _GPU, "--fit_in", card, "--json", str(out))
    with redirect_stdout(StringIO()), suppress(UserError):
        plan_command(words)
    plan: dict[str, Any] = json.loads(out.read_text())
    return plan


def _plan(name: str, folder: str, *more: str) -> dict[str, Any]:
    return make_plan(_words(name, folder, *more))


def _words(name: str, folder: str, *more: str) -> list[str]:
    return ["--config", f"{name}.yaml", *more, "--model.lm", folder, "--trainer.accelerator", "gpu"]


def _gathered(config: PreTrainedConfig, prunable: int) -> int:
    """Bytes that FSDP2 holds whole at a time: two blocks, which are all alike here, and what is outside of them."""
    block = prunable // config.num_hidden_layers
    tables = 1 if config.tie_word_embeddings else 2
    gathered: int = 2 * block * _OF_A_WEIGHT + tables * config.vocab_size * config.hidden_size * 2
    return gathered


def _millions(count: int) -> str:
    return f"{count / 1e6:,.0f} M"


def _with_card(size: int) -> str:
    """GiB, and the smallest card that has them."""
    card = next((card for card in _CARDS if size <= USABLE * parse_size(card)), None)
    return f"{size / 2**30:.1f} ({card.removesuffix('GB') if card else '-'})"


def tables(names: Sequence[str]) -> dict[str, str]:
    """The rows of some configurations in Markdown, by the marker of their table."""
    made = {"plan_table": [_HEAD, *map(row, names)], "gpu_table": [_GPU_HEAD, *map(gpu_row, names)]}
    made["plan_table"].insert(1, ["---", *["---:"] * (len(_HEAD) - 1)])
    made["gpu_table"].insert(1, ["---", "---:", "---", "---"])
    return {name: "".join(f"| {' | '.join(line)} |\n" for line in lines) for name, lines in made.items()}


def main() -> int:
    """Print or write the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="configurations; all of them if left out")
    parser.add_argument("--write", type=Path, metavar="PAGE")
    options = parser.parse_args()
    made = tables(options.names or list(configurations()))
    if not options.write:
        sys.stdout.write("\n".join(made.values()))
        return 0
    page = options.write.read_text()
    for name, rows in made.items():
        before = re.search(_MARKED.format(name), page, re.DOTALL)
        assert before
        page = page[: before.start()] + rows + page[before.end() :]
    options.write.write_text(page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
