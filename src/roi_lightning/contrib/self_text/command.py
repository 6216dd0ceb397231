"""`sample LM --out FILE`: have a model write calibration text."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from roi_lightning.cli.arguments import DType
from roi_lightning.cli.options import parse_options
from roi_lightning.contrib.self_text.settings import BATCH_SIZE, SampleSettings, about
from roi_lightning.errors import UserError, check_at_least
from roi_lightning.utils.atomic_io import check_writable


@dataclass(frozen=True, kw_only=True)
class SampleOptions(SampleSettings):
    """Have a model write documents, token by token, at temperature 1 with nothing cut off.

    Writes JSON lines with the field `text`, which --corpora takes, and beside them what they depend on (.about.json).
    After an interruption, run the same command again to resume.

    Attributes:
        lm: Hub id, directory, or GGUF file.
        out: The .jsonl file to write.
        batch_size: Documents to write at a time; more take more memory.
        revision: Branch, tag or commit of a hub id.
        dtype: Number type of the weights; auto takes the stored type, and bfloat16 for GGUF.
        device: Device to run on: auto, cpu, cuda or cuda:N.
        trust_remote_code: Let the model repository's own Python code run.

    Raises:
        UserError: For numbers out of range, and a file that is not called .jsonl, or is there already.
    """

    lm: str = field(kw_only=False)
    out: Path
    batch_size: int = BATCH_SIZE
    revision: str | None = None
    dtype: DType = "auto"
    device: str = "auto"
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(self, batch_size=1)
        if self.out.suffix != ".jsonl":
            raise UserError(f"--out {str(self.out)!r} is to hold JSON lines; give a name that ends in .jsonl")
        for path in (self.out, about(self.out)):
            if path.exists():
                raise UserError(f"{str(path)!r} is there already; remove it or give another --out")
        check_writable(self.out)

    @property
    def settings(self) -> SampleSettings:
        """Which documents."""
        return SampleSettings(
            tokens=self.tokens, max_tokens=self.max_tokens, seed=self.seed, start=self.start
        )


def main(argv: Sequence[str]) -> int:
    """Sample, write, and say how much it is.

    Returns:
        0.

    Raises:
        UserError: For a model that can't be read or writes nothing, and a file that can't be written.
    """
    options = parse_options(SampleOptions, "sample", argv)
    from roi_lightning.contrib.self_text.corpus import Author, summary, write_samples
    from roi_lightning.models.config import load_tokenizer
    from roi_lightning.models.source import resolve_model
    from roi_lightning.utils.devices import choose_device

    author = Author(
        source=resolve_model(options.lm, options.revision),
        tokenizer=load_tokenizer(options.lm, options.revision, options.trust_remote_code),
        device=choose_device(options.device),
        dtype=options.dtype,
        batch_size=options.batch_size,
        trust_remote_code=options.trust_remote_code,
    )
    facts = write_samples(author, options.settings, options.out)
    run = facts["run"]
    rate = f"{run['tokens'] / run['seconds']:,.0f} tokens/s" if run["seconds"] else "read, not sampled"
    sys.stdout.write(f"{options.out}: {summary(facts)} ({rate})\n")
    return 0
