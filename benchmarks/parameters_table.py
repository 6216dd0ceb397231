"""How many parameters each method learns for the paper's models, and where the paper's Table 3 prints something else.

    python -m benchmarks.parameters_table

Prints both tables of `results/parameters.md`. What `plan` counts with does the counting, from the published sizes in
`shapes.json`; no model is fetched.
"""

import tempfile
from collections.abc import Callable, Mapping
from typing import Final

from benchmarks.plan_table import architecture
from roi_lightning.contrib.proxsparse import ProxSparseModule
from roi_lightning.learning.base import MaskLearningModule
from roi_lightning.learning.memory_plan import Planner
from roi_lightning.learning.roi import RoILightningModule
from roi_lightning.samplers import Categorical, GumbelTopK
from roi_lightning.utils.progress import progress
from roi_lightning.utils.tables import markdown_table

MODELS: Final = (*(f"Qwen/Qwen2.5-{size}" for size in ("0.5B", "1.5B", "3B", "7B")), "google/gemma-2-9b")
PATTERNS: Final = ("2:4", "2:8", "4:8")
# The learner of a method, on the model in a folder and at a pattern.
_LEARNERS: Final[dict[str, Callable[[str, str], MaskLearningModule]]] = {
    "RoI": lambda lm, pattern: RoILightningModule(lm, pattern=pattern, sampler=GumbelTopK()),
    "MaskLLM": lambda lm, pattern: RoILightningModule(lm, pattern=pattern, sampler=Categorical()),
    "ProxSparse": lambda lm, pattern: ProxSparseModule(lm, pattern=pattern, strength=0.2),  # any counts alike
}
_ROI: Final = ("0.4", "1.3", "2.7", "6.5")
# Billions, of the first four models.
PRINTED: Final = {
    ("ProxSparse", "2:4"): _ROI,
    ("MaskLLM", "2:4"): ("0.6", "2.0", "4.0", "9.8"),
    ("RoI", "2:4"): _ROI,
    ("MaskLLM", "2:8"): ("1.4", "4.6", "9.5", "22.8"),
    ("RoI", "2:8"): _ROI,
}
# Learned parameters by method and pattern.
Counts = Mapping[tuple[str, str], int]


def counts(lm: str) -> Counts:
    """What is learned on a model.

    Args:
        lm: Its hub id.
    """
    with tempfile.TemporaryDirectory() as folder:
        architecture(lm).save_pretrained(folder)
        return {
            (method, pattern): Planner(learner(folder, pattern)).learned
            for method, learner in _LEARNERS.items()
            for pattern in PATTERNS
            if method != "ProxSparse" or pattern == "2:4"  # which its regulariser is made for
        }


def counted_table(found: Mapping[str, Counts]) -> str:
    """A row for each model and pattern.

    Args:
        found: `counts` by hub id.
    """
    rows = [
        [
            lm.partition("/")[2],
            pattern,
            f"{own['RoI', pattern]:,}",
            f"{own['MaskLLM', pattern]:,}",
            f"{own['MaskLLM', pattern] / own['RoI', pattern]:g}",
            f"{own['ProxSparse', pattern]:,}" if ("ProxSparse", pattern) in own else "",
        ]
        for lm, own in found.items()
        for pattern in PATTERNS
    ]
    return markdown_table(["model", "N:M", "RoI", "MaskLLM", "÷ RoI", "ProxSparse"], rows, left=2)


def printed_table(found: Mapping[str, Counts]) -> str:
    """The paper's table, with the count behind it where that rounds to something else.

    Args:
        found: `counts` by hub id.
    """
    named = list(found)[: len(_ROI)]
    rows = [
        [
            pattern,
            method,
            *(_cell(found[lm][method, pattern], x) for lm, x in zip(named, printed, strict=True)),
        ]
        for (method, pattern), printed in PRINTED.items()
    ]
    return markdown_table(["N:M", "method", *(lm.partition("/")[2] for lm in named)], rows, left=2)


def _cell(count: int, printed: str) -> str:
    counted = f"{count / 1e9:.1f}"
    return f"{printed} B" if counted == printed else f"{printed} B (counted: **{counted} B**)"


def main() -> None:
    """Print both tables."""
    found = {lm: counts(lm) for lm in progress(MODELS, "models")}
    print(counted_table(found), printed_table(found), sep="\n\n")


if __name__ == "__main__":
    main()
