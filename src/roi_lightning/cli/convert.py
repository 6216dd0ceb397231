"""`convert DIR --to gguf --out FILE`: an export in another program's format."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from roi_lightning.cli.options import parse_options
from roi_lightning.utils.atomic_io import check_writable, write_json
from roi_lightning.utils.extras import require
from roi_lightning.utils.tables import print_table


@dataclass(frozen=True, kw_only=True)
class ConvertOptions:
    """Write an exported directory as a GGUF file, which llama.cpp and what is built on it run.

    Pruned weights are exactly zero in it; they take as much space and time as any other.

    Attributes:
        directory: A directory of fit, export, prune, refit or apply, of any N:M.
        to: The format.
        out: The file to write.
        weights: What matrices are held in: float16, bfloat16, or eight bits with a scale for every 32 (q8_0). Norms
            and biases are float32.
        overwrite: Replace a file there.
        json: Also write the sizes as JSON there.
    """

    directory: Path = field(kw_only=False)
    to: Literal["gguf"]
    out: Path
    weights: Literal["f16", "bf16", "q8_0"] = "f16"
    overwrite: bool = False
    json: Path | None = None


def main(argv: Sequence[str]) -> int:
    """Convert, check what was written, and say how large it is.

    Returns:
        0.

    Raises:
        UserError: If the directory can't be converted, or a file can't be written.
    """
    options = parse_options(ConvertOptions, "convert", argv)
    require("gguf", "--to gguf")
    if options.json:
        check_writable(options.json)
    from roi_lightning.export.gguf_file import write_gguf

    sizes = write_gguf(options.directory, options.out, weights=options.weights, overwrite=options.overwrite)
    rows = [
        [
            f"{sizes.tensors} tensors",
            f"{sizes.before / 1e6:,.2f}",
            f"{sizes.after / 1e6:,.2f}",
            f"{sizes.after / sizes.before:.4f}",
        ]
    ]
    print_table(["", "directory, MB", "GGUF, MB", "ratio"], rows)
    if sizes.as_f16:
        sys.stdout.write(f"{sizes.as_f16} matrices are f16: their rows are no multiple of 32\n")
    sys.stdout.write(f"{options.out}: written and verified\n")
    if options.json:
        write_json(options.json, sizes.to_json())
    return 0
