"""`apply LM MASK --out DIR`: a base model and a mask file make the directory that export made."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from roi_lightning.cli.options import parse_options


@dataclass(frozen=True, kw_only=True)
class ApplyOptions:
    """Write a base model with a mask applied to it.

    Attributes:
        lm: The base model: hub id, directory, or GGUF file.
        mask: A mask file, a run's folder or an exported directory.
        out: The directory to write.
        overwrite: Replace an earlier export there.
        dtype: What a GGUF model is cast to (default: what the mask was made for).
    """

    lm: str = field(kw_only=False)
    mask: Path = field(kw_only=False)
    out: Path
    overwrite: bool = False
    dtype: Literal["float32", "bfloat16", "float16"] | None = None


def main(argv: Sequence[str]) -> int:
    """Write the directory and say what it holds.

    Returns:
        0.

    Raises:
        UserError: If the mask is of another model, or the directory can't be written.
    """
    options = parse_options(ApplyOptions, "apply", argv)
    from roi_lightning.export import write_export
    from roi_lightning.masks.mask_set import MaskSet
    from roi_lightning.models.base_tensors import open_base
    from roi_lightning.models.source import resolve_model

    masks = MaskSet.load(options.mask)
    source = resolve_model(options.lm, commit=masks.base.revision)
    base = open_base(source, options.dtype or masks.base.dtype)
    out = write_export(base, masks, options.out, overwrite=options.overwrite)
    of = "prunable" if masks.is_mixed else "masked"
    sys.stdout.write(f"{out}: {masks.pattern}, {masks.amount} {of} weights kept, verified\n")
    return 0
