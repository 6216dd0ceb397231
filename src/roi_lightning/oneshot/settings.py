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
        mask_only: With sparsegpt, leave the kept weights as they are; otherwise sparsegpt updates them.
        pattern: N:M, N kept of every M consecutive inputs.
        patterns: Another N:M, or dense, for layers by name or glob: '{"*.down_proj": "4:8", "*.k_proj": dense}'.
            A full name wins over globs; the last matching glob wins over earlier ones.
        windows: Number of windows of calibration text.
        seq_len: Tokens in each window.
        seed: Seed for choosing the windows, and for methods that draw at random.
        activations: Which outputs of earlier blocks a block is measured on: sequential, those of the pruned blocks;
            dense, those of the unpruned model, which takes half the passes.
        device: Device that runs the blocks, one at a time: auto, cpu, cuda or cuda:N.
        offload_dir: Folder for the hidden states between two blocks; if left out, they stay in memory.
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
