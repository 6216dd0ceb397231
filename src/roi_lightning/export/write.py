"""Write a masked model as an ordinary Hugging Face directory: aside, verified, then renamed."""

import json
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor
from transformers.modeling_utils import PreTrainedModel

from roi_lightning.atomic import written_aside
from roi_lightning.errors import UserError
from roi_lightning.export.base import BaseTensors, bits, open_base
from roi_lightning.export.card import model_card
from roi_lightning.export.destination import check_destination, check_not_base, needed_bytes
from roi_lightning.export.fit import check_masks_fit, check_updates
from roi_lightning.export.sidecar import describe, seal
from roi_lightning.export.verify import require_verified
from roi_lightning.masks import MASK_FILE, MaskSet
from roi_lightning.progress import progress
from roi_lightning.sources import ModelSource


def write_export(
    source: ModelSource,
    masks: MaskSet,
    out: Path,
    *,
    updates: Mapping[str, Tensor] | None = None,
    dtype: str | None = None,
    training: Mapping[str, object] | None = None,
    perplexity: Mapping[str, float] | None = None,
    lm: PreTrainedModel | None = None,
    overwrite: bool = False,
    run: str | None = None,
) -> Path:
    """Apply masks to a base model's own tensors and write the result.

    Args:
        source: The base model.
        masks: Made for exactly this model.
        out: The directory to make.
        updates: The masked tensors whose survivors were changed, as named in `masks.updated`; in the layout
            and dtype of the base's.
        dtype: What a GGUF model is cast to; None for the one the masks were made for.
        training: How the masks were made, for the sidecar and the card; anything JSON can spell.
        perplexity: By name, likewise.
        lm: A GGUF base that is already loaded (plain, in `dtype`), to spare loading it again.
        overwrite: Replace an earlier export at `out`.
        run: The fingerprint of a run whose own earlier export is replaced all the same.

    Returns:
        `out`, absolute.

    Raises:
        UserError: If the masks do not fit, `out` can't be used, or the result does not verify; nothing
            new is left behind then.
    """
    out = out.absolute()
    masks.check()
    updates = updates or {}
    check_updates(masks, updates)
    base = open_base(source, dtype or masks.base.dtype, lm)
    check_not_base(out, source)
    check_destination(out, needed_bytes(base), overwrite=overwrite, run=run)
    check_masks_fit(source, masks, base)
    with written_aside(out) as partial:
        partial.mkdir()
        _write_weights(base, masks, updates, partial)
        base.write_companions(partial)
        masks.save(partial / MASK_FILE)
        dequantized = source.kind == "gguf" or None
        facts = {"dequantized": dequantized, "training": training, "perplexity": perplexity}
        _describe(partial, masks, base, facts)
        require_verified("the export", partial, base)
    return out


def _write_weights(base: BaseTensors, masks: MaskSet, updates: Mapping[str, Tensor], folder: Path) -> None:
    for file_name in progress(sorted(set(base.files.values())), "writing weights"):
        base.write_weights(file_name, folder)
        masked = {
            name: (updates[name] if name in updates else base[name]).masked_fill(~layer.to_bool(), 0)
            for name, layer in masks.layers.items()
            if base.files[name] == file_name
        }
        overwrite_tensors(folder / file_name, masked)


def overwrite_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Replace the values of some tensors in a safetensors file; every other byte stays.

    Args:
        path: The file, with tensors of the same names, shapes and dtypes.
        tensors: On the CPU.
    """
    with path.open("r+b") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
        for name, tensor in tensors.items():
            start, end = header[name]["data_offsets"]
            values = bits(tensor)
            if values.numel() != end - start:
                raise UserError(f"{name!r} takes {end - start} bytes on disk, not {values.numel()}")
            file.seek(8 + length + start)
            file.write(values.numpy().data)


def _describe(folder: Path, masks: MaskSet, base: BaseTensors, facts: Mapping[str, object]) -> None:
    description = describe(masks, base, facts)
    (folder / "README.md").write_text(model_card(masks, description), encoding="utf-8")
    seal(folder, description)
