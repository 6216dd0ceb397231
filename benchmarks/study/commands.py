"""Commands of `roi_lightning` one after the other, in one process that imports once.

    python -m benchmarks.study.commands '[["prune", "smollm2-135m", ...], ["held_out", ...], ...]'

There are two more: `held_out MODEL SETTINGS OUT`, the perplexity of a model on the windows on which a learning run
with these settings of the data module (JSON) validates, and `differs MASK PRIOR OUT`, the fraction of the weights
that one mask keeps and the other does not.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path

from roi_lightning.__main__ import main as roi_lightning
from roi_lightning.data import CalibrationDataModule
from roi_lightning.evaluation.perplexity import token_perplexity
from roi_lightning.masks.mask_set import MaskSet
from roi_lightning.models.loading import load_language_model
from roi_lightning.models.source import resolve_model
from roi_lightning.utils.devices import choose_device


def main() -> None:
    """Run all; stop at the first that fails."""
    for command in json.loads(sys.argv[1]):
        print("roi-lightning", *command, flush=True)
        name, *arguments = command
        if name in OWN:
            Path(arguments[-1]).write_text(json.dumps(OWN[name](*arguments[:-1])) + "\n")
        elif status := roi_lightning(command):
            raise SystemExit(status)


def held_out(model: str, settings: str) -> float:
    """Measure a model where learning runs validate."""
    data = CalibrationDataModule(**json.loads(settings))
    data.setup("validate")
    windows = data.windows("val", data.val_tokens // data.seq_len)
    device = choose_device("auto")
    lm = load_language_model(resolve_model(model), device=device).to(device)  # type: ignore[arg-type]
    return token_perplexity(lm, windows.split(1))


def differs(mask: str, prior: str) -> float:
    """How much of what a mask keeps the prior does not keep."""
    return 1 - MaskSet.load(Path(mask)).overlap(MaskSet.load(Path(prior))).all


OWN: dict[str, Callable[..., float]] = {"held_out": held_out, "differs": differs}


if __name__ == "__main__":
    main()
