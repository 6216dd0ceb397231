"""`permute LM --pattern N:M --corpora TEXT --out DIR`: reorder hidden channels so that N:M masks lose less."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path

from roi_lightning.cli.options import parse_options
from roi_lightning.errors import check_at_least


@dataclass(frozen=True, kw_only=True)
class PermuteOptions:
    """Reorder the hidden channels of MLPs and of value heads, so that groups of M lose less when N of them are kept.

    Writes a directory whose model computes the same as before. Give that directory to fit, prune and evaluate.

    Attributes:
        lm: Hub id, directory, or GGUF file.
        pattern: N:M that the order is chosen for.
        out: The directory to write.
        overwrite: Replace an earlier directory there.
        corpora: Calibration text, as in data.corpora: files, globs, hub ids, python-docs, or mappings like
            '{source: x.jsonl, text_field: body}'; for chats '{source: x.jsonl, messages_field: messages}'.
        windows: Number of windows of calibration text.
        seq_len: Tokens in each window.
        seed: Seed for choosing the windows.
        revision: Branch, tag or commit of a hub id.
        device: Device that runs the model, in fp32, and exchanges its channels: auto, cpu, cuda or cuda:N.

    Raises:
        UserError: For numbers out of range.
    """

    lm: str = field(kw_only=False)
    pattern: str = "2:4"
    out: Path
    overwrite: bool = False
    corpora: Sequence[str] = ("python-docs",)
    windows: int = 128
    seq_len: int = 2048
    seed: int = 0
    revision: str | None = None
    device: str = "auto"

    def __post_init__(self) -> None:
        check_at_least(self, windows=1, seq_len=2, seed=0)


def main(argv: Sequence[str]) -> int:
    """Parse, and only then import what runs it."""
    options = parse_options(PermuteOptions, "permute", argv)
    import_module("roi_lightning.contrib.permute.run").run(options)
    return 0
