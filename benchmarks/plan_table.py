"""What the shipped configurations take on 1, 8 and 16 GPUs: a Markdown table of what `plan` counts.

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
from pathlib import Path
from typing import Any, Final

import yaml
from transformers import AutoConfig, PreTrainedConfig

from roi_lightning.cli.config_files import shipped_configs
from roi_lightning.cli.fit_in import USABLE, parse_size
from roi_lightning.cli.plan import make_plan

SHAPES: Final = Path(__file__).with_name("shapes.json")
_MARKED: Final = re.compile(r"(?<=<!-- plan_table -->\n).*?(?=<!-- end -->)", re.DOTALL)
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


def _plan(name: str, folder: str, *more: str) -> dict[str, Any]:
    return make_plan(
        ["--config", f"{name}.yaml", "--model.lm", folder, "--trainer.accelerator", "gpu", *more]
    )


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


def table(names: Sequence[str]) -> str:
    """The rows of some configurations in Markdown."""
    ruler = ["---", *["---:"] * (len(_HEAD) - 1)]
    lines = [_HEAD, ruler, *map(row, names)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def main() -> int:
    """Print or write the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="configurations; all of them if left out")
    parser.add_argument("--write", type=Path, metavar="PAGE")
    options = parser.parse_args()
    rows = table(options.names or list(configurations()))
    if options.write:
        options.write.write_text(_MARKED.sub(lambda _: rows, options.write.read_text()))
    else:
        sys.stdout.write(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
