"""The options of pruning without training; importing this imports neither torch nor transformers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from roi_lightning.errors import check_at_least

Activations = Literal["sequential", "dense"]


@dataclass(frozen=True, kw_only=True)
class PruneSettings:
    """How to prune.

    Attributes:
        method: magnitude (reads no text), wanda, sparsegpt, hyperprune, or a class path, with options as
            '{class_path: SparseGPT, init_args: {damping: 0.1}}'; in Python also the method itself.
        mask_only: With sparsegpt, keep the values of what is kept; otherwise they are updated.
        pattern: N:M, N kept of every M consecutive inputs.
        patterns: Another N:M, or dense, of some layers, by name or glob: '{"*.down_proj": "4:8", "*.k_proj": dense}'.
            A full name wins over globs, of several globs the last.
        windows: How many windows of calibration text.
        seq_len: Tokens of each.
        seed: Of the choice of windows, and of what a method draws.
        activations: What the layers of a block see: sequential, what the pruned blocks before it give; dense, in half
            the passes, what the unpruned ones would.
        device: Where blocks run, one at a time: auto, cpu, cuda or cuda:N.
        offload_dir: Folder for the hidden states between two blocks, which otherwise stay in memory.
        targets: Names or globs of the layers to prune.
        ignore: Names or globs of layers to leave dense.

    Raises:
        UserError: For numbers that make no sense.
    """

    method: Any = "wanda"
    mask_only: bool = False
    pattern: str = "2:4"
    patterns: Mapping[str, str | int] | None = None
    windows: int = 128
    seq_len: int = 2048
    seed: int = 0
    activations: Activations = "sequential"
    device: str = "auto"
    offload_dir: Path | None = None
    targets: Sequence[str] = ("*",)
    ignore: Sequence[str] = ()

    def __post_init__(self) -> None:
        check_at_least(self, windows=1, seq_len=2, seed=0)
