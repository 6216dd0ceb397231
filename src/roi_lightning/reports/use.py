"""What to do with a result: commands with the paths of the run itself."""

import shlex
from dataclasses import dataclass
from typing import Final

from roi_lightning.reports.endings import PROGRAM, resume_command
from roi_lightning.reports.sources import Mask

_FROM_PRETRAINED: Final = """from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained(PATH)
tokenizer = AutoTokenizer.from_pretrained(PATH)"""
_FROM_PACKED: Final = (
    f"import roi_lightning.runtime  # teaches transformers the packed format\n{_FROM_PRETRAINED}"
)


@dataclass(frozen=True)
class Step:
    """Something to do with a result.

    Attributes:
        title: What it does.
        code: Commands, or Python.
    """

    title: str
    code: str


def next_steps(mask: Mask) -> list[Step]:
    """Commands for a mask's own paths."""
    steps = []
    if mask.status != "finished" and (command := resume_command(mask)):
        steps.append(Step("Finish the run: it resumes from its last checkpoint", command))
    if mask.export is None:
        return steps
    directory, base = str(mask.export), mask.model

    def line(*words: str) -> str:
        return shlex.join([PROGRAM, *words])

    packed = mask.sidecar.get("format", "").endswith("packed")
    steps.append(Step("Check every byte of it", line("verify", directory, "--base", base)))
    measured = f"{mask.path.resolve().name}-metrics.json"
    steps.append(
        Step("Measure it beside the dense model", line("evaluate", base, directory, "--json", measured))
    )
    if packed:
        steps.append(Step("Load it", _FROM_PACKED.replace("PATH", repr(directory))))
        return steps
    steps.append(
        Step("Load it: an ordinary Hugging Face model", _FROM_PRETRAINED.replace("PATH", repr(directory)))
    )
    if mask.pattern in ("2:4", "2:4 + dense"):
        out = f"{directory.rstrip('/')}-packed"
        steps.append(Step("Store and run it in fewer bytes", line("pack", directory, "--out", out)))
    return steps
