"""`pack DIR --out DIR`: write a 2:4 export in fewer bytes, for fast decoding on CPUs."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from roi_lightning.cli.options import parse_options
from roi_lightning.utils.atomic_io import check_writable, write_json
from roi_lightning.utils.tables import print_table

_PROVEN: Final = {
    "stored": "unpacks to the same bytes",
    "int8": "int8 times scale is within half a step of every kept weight and zero for every pruned one, all else "
    "unpacks to the same bytes",
}


@dataclass(frozen=True, kw_only=True)
class PackOptions:
    """Write a smaller directory of a 2:4 model: kept weights, and two bits for the position of each.

    transformers loads it once roi_lightning.contrib.packed is imported.

    Attributes:
        directory: A 2:4 directory that fit, export, prune or apply wrote.
        out: The directory to write.
        weights: How to store kept weights: unchanged (stored), or rounded to int8 with a scale for each row of
            outputs (off by at most the row's largest weight / 254). Pruned weights are exactly zero either way.
        overwrite: Replace an earlier directory there.
        json: File to write the sizes to as JSON, besides printing.
    """

    directory: Path = field(kw_only=False)
    out: Path
    weights: Literal["stored", "int8"] = "stored"
    overwrite: bool = False
    json: Path | None = None


def main(argv: Sequence[str]) -> int:
    """Pack, unpack again, and say what it saves.

    Returns:
        0.

    Raises:
        UserError: If the directory can't be packed, or a file can't be written.
    """
    options = parse_options(PackOptions, "pack", argv)
    from roi_lightning.contrib.packed import write_packed

    if options.json:
        check_writable(options.json)
    sizes = write_packed(options.directory, options.out, weights=options.weights, overwrite=options.overwrite)
    rows = [
        [name, f"{before / 1e6:,.2f}", f"{after / 1e6:,.2f}", f"{after / before:.4f}"]
        for name, before, after in (
            (f"{sizes.layers} masked tensors", sizes.linears, sizes.packed),
            ("all files", sizes.before, sizes.after),
        )
    ]
    print_table(["", "before, MB", "after, MB", "ratio"], rows)
    sys.stdout.write(f"{options.out}: {_PROVEN[options.weights]}\n")
    if options.json:
        write_json(options.json, sizes.to_json())
    return 0
