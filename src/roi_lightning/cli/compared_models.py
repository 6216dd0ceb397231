"""The options of commands that compare models: which, how they are loaded, and where results are written."""

from dataclasses import dataclass, field
from pathlib import Path

from roi_lightning.models.config import DType
from roi_lightning.utils.atomic_io import check_writable


@dataclass(frozen=True, kw_only=True)
class ComparedModels:
    """Models, side by side.

    Attributes:
        lm: Hub ids, directories (packed or not), GGUF files, or mask files (with --base).
        base: The model that mask files apply to.
        dtype: Of the weights: auto for the stored one, bfloat16 for GGUF.
        device: auto, cpu, cuda or cuda:N.
        json: Also write the results as JSON there.
        markdown: Also write them as Markdown there.
        trust_remote_code: Let the models' own Python code run.
    """

    lm: list[str] = field(kw_only=False)
    base: str | None = None
    dtype: DType = "auto"
    device: str = "auto"
    json: Path | None = None
    markdown: Path | None = None
    trust_remote_code: bool = False

    def check_outputs(self) -> None:
        """Raise a `UserError` if results can't be written where they are to go."""
        for out in filter(None, (self.json, self.markdown)):
            check_writable(out)
