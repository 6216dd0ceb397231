"""Write a masked model as an ordinary Hugging Face directory: to a temporary path, verified, then renamed."""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from roi_lightning.export.destination import check_destination, check_not_base, needed_bytes
from roi_lightning.export.model_card import model_card
from roi_lightning.export.sidecar import EXPORTED, command_line, describe, heading, plain, write_sidecar
from roi_lightning.export.verify import verify_export
from roi_lightning.masks.mask_set import MASK_FILE, MaskSet
from roi_lightning.models.base_tensors import BaseTensors, open_base, overwrite_tensors
from roi_lightning.models.fingerprint import check_masks_fit, check_updates
from roi_lightning.models.source import ModelSource
from roi_lightning.utils.atomic_io import written_aside
from roi_lightning.utils.progress import progress


def write_export(
    source: ModelSource | BaseTensors,
    masks: MaskSet,
    out: Path,
    *,
    updates: Mapping[str, Tensor] | None = None,
    training: Mapping[str, object] | None = None,
    perplexity: Mapping[str, float] | None = None,
    overwrite: bool = False,
    run: str | None = None,
) -> Path:
    """Apply masks to a base model's own tensors and write the result.

    Args:
        source: The base model; a GGUF model is cast to what the masks were made for.
        masks: Made for exactly this model.
        out: The directory to make.
        updates: The tensors that were changed, masked or not, as named in `masks.updated`; in the layout and dtype of
            the base's.
        training: How the masks were made, for the sidecar and the card; anything JSON can spell.
        perplexity: By name, likewise.
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
    base = open_base(source, masks.base.dtype)
    check_not_base(out, base.source)
    check_destination(out, needed_bytes(base), overwrite=overwrite, run=run)
    check_masks_fit(base, masks)
    with written_aside(out) as partial:
        partial.mkdir()
        _write_weights(base, masks, updates, partial)
        base.write_companions(partial)
        masks.save(partial / MASK_FILE)
        description = heading(EXPORTED) | describe(masks, base)
        facts = {
            "command": command_line(),
            "dequantized": _gguf_facts(base.source),
            "training": training,
            "perplexity": perplexity,
        }
        description |= {key: plain(value) for key, value in facts.items() if value is not None}
        (partial / "README.md").write_text(model_card(masks, description), encoding="utf-8")
        write_sidecar(partial, description)
        verify_export(partial, base).require("the export")
    return out


def _gguf_facts(source: ModelSource) -> dict[str, Any] | None:
    """A GGUF file's name and the number of its matrices of each type, in the blocks and elsewhere."""
    if source.kind != "gguf" or source.path is None:
        return None
    from gguf import GGUFReader

    counts: dict[str, Counter[str]] = {"blocks": Counter(), "others": Counter()}
    for tensor in GGUFReader(source.path).tensors:
        if len(tensor.shape) > 1:
            counts["blocks" if tensor.name.startswith("blk.") else "others"][tensor.tensor_type.name] += 1
    return {"file": source.path.name, **counts}


def _write_weights(base: BaseTensors, masks: MaskSet, updates: Mapping[str, Tensor], folder: Path) -> None:
    for file_name in progress(sorted(set(base.files.values())), "writing weights"):
        base.write_weights(file_name, folder)
        changed = {name: tensor for name, tensor in updates.items() if base.files[name] == file_name}
        for name, layer in masks.layers.items():
            if base.files[name] == file_name:
                kept = changed[name] if name in changed else base[name]
                changed[name] = kept.masked_fill(~layer.to_bool(), 0)
        overwrite_tensors(folder / file_name, changed)
