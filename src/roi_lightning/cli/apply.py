"""`apply LM MASK --out DIR`: a base model and a mask file make the directory that export made."""

import sys

from roi_lightning.cli.arguments import ApplyOptions
from roi_lightning.export import write_export
from roi_lightning.masks.mask_set import MaskSet
from roi_lightning.models.base_tensors import open_base
from roi_lightning.models.source import resolve_model


def main(options: ApplyOptions) -> None:
    """Write the directory and say what it holds.

    Raises:
        UserError: If the mask is of another model, or the directory can't be written.
    """
    masks = MaskSet.load(options.mask)
    source = resolve_model(options.lm, commit=masks.base.revision)
    base = open_base(source, options.dtype or masks.base.dtype)
    out = write_export(base, masks, options.out, overwrite=options.overwrite)
    of = "prunable" if masks.is_mixed else "masked"
    sys.stdout.write(f"{out}: {masks.pattern}, {masks.amount} {of} weights kept, verified\n")
