"""`refit EXPORT --corpora TEXT --out DIR`: new values for the weights that a mask keeps, block by block."""

import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from roi_lightning.cli.calibration import calibration_data, text_facts
from roi_lightning.cli.options import parse_options
from roi_lightning.errors import UserError, check_at_least
from roi_lightning.export import check_destination, check_not_base, needed_bytes, write_export
from roi_lightning.export.recorded import export_directory, recorded_layers
from roi_lightning.export.sidecar import read_sidecar
from roi_lightning.masks.mask_set import MaskSet
from roi_lightning.models.base_tensors import open_base
from roi_lightning.models.config import DType, load_config, max_positions
from roi_lightning.models.fingerprint import check_masks_fit
from roi_lightning.models.loading import load_language_model
from roi_lightning.models.source import ModelSource, resolve_model
from roi_lightning.models.stored_tensors import StoredTensors
from roi_lightning.models.weight_names import stored_weights
from roi_lightning.oneshot import Calibration, Refit, TensorStore, calibration_windows, prune_model
from roi_lightning.utils.devices import choose_device
from roi_lightning.utils.tables import print_table

_LEARNED: Final = (
    "{!r} was learned from the loss of the whole model, and a refit sees one block at a time: such a mask was worse "
    "afterwards where it was measured; compare the two with evaluate"
)


@dataclass(frozen=True, kw_only=True)
class RefitOptions:
    """Fit the weights that a mask keeps so that every block gives nearly what the dense one gives.

    The mask stays, pruned weights stay zero, and no gradient goes through more than one block. Longer training of the
    model as a whole is fit --config recover.yaml.

    Attributes:
        export: What fit, prune, apply or export wrote.
        out: The directory to write.
        overwrite: Replace an earlier export there.
        base: The dense model it was made from, if that is no longer where the export says.
        corpora: Text, as in data.corpora: files, globs, hub ids, python-docs, self, or mappings like
            '{source: x.jsonl, text_field: body}'; of chats '{source: x.jsonl, messages_field: messages}'.
        windows: How many windows of it.
        seq_len: Tokens of each.
        seed: Of the choice of windows, and of their order.
        steps: Steps of Adam for the attention of each block, and again for its MLP.
        windows_per_step: Windows of a step.
        lr: Adam's learning rate at the first step; a cosine leads to a tenth of it.
        dtype: In which the model runs: auto for the stored one, bfloat16 for GGUF.
        device: Where blocks run, one at a time: auto, cpu, cuda or cuda:N.
        offload_dir: Folder for the hidden states between two blocks, which otherwise stay in memory.
        trust_remote_code: Run the model repository's code.

    Raises:
        UserError: For numbers out of range.
    """

    export: str = field(kw_only=False)
    out: Path
    overwrite: bool = False
    base: str | None = None
    corpora: Sequence[str] = ("python-docs",)
    windows: int = 64
    seq_len: int = 512
    seed: int = 0
    steps: int = 64
    windows_per_step: int = 2
    lr: float = 3e-4
    dtype: DType = "auto"
    device: str = "auto"
    offload_dir: Path | None = None
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        check_at_least(self, windows=1, seq_len=2, seed=0, steps=1, windows_per_step=1)
        if not 0 < self.lr < float("inf"):
            raise UserError(f"--lr is {self.lr}; give a number above 0")


def main(argv: Sequence[str]) -> int:
    """Fit, write, verify, and say how much of the error is left.

    Returns:
        0.

    Raises:
        UserError: For what is no export, a base that it was not made from, and what can't be read or written.
    """
    options = parse_options(RefitOptions, "refit", argv)
    export = export_directory(options.export)
    masks, source = _given(export, options)
    sidecar = read_sidecar(export)
    if "learner" in sidecar.get("training", {}):
        warnings.warn(_LEARNED.format(options.export), stacklevel=2)
    calibration, facts = _text(source, options)
    lm = load_language_model(source, options.dtype, options.trust_remote_code, device=calibration.device)
    base = open_base(source, masks.base.dtype, lm)
    chosen = recorded_layers(lm, export, sidecar, source.spec)
    check_masks_fit(base, masks)
    names, tensors = stored_weights(base.source, lm, chosen.pruned), StoredTensors(export)
    method = Refit(
        {layer: masks.layers[name] for layer, name in names.items()},
        lambda layer: tensors[names[layer]],
        options.steps,
        options.windows_per_step,
        options.lr,
    )
    started = time.monotonic()
    with TensorStore.beside(options.out) as updates:
        fitted = prune_model(base, lm, chosen, method, calibration, updates.put)
        facts = {"method": "refit", "export": options.export, **method.facts(), **facts}
        facts |= {"seconds": round(time.monotonic() - started, 1)}
        out = write_export(
            base, fitted, options.out, updates=updates, training=facts, overwrite=options.overwrite
        )
    _show(source.spec, method)
    sys.stdout.write(f"{out}: written and verified\n")
    return 0


def _given(export: Path, options: RefitOptions) -> tuple[MaskSet, ModelSource]:
    """The masks of the export and the dense model; what can be refused is, before text or weights are read."""
    masks = MaskSet.load(export)
    if others := sorted(masks.updated.keys() - masks.layers.keys()):
        raise UserError(
            f"{options.export!r} has {len(others)} trained norms or biases, {others[0]!r} first, which a refit would "
            "put back to the dense model's; refit first and recover afterwards"
        )
    source = resolve_model(options.base or masks.base.spec, None if options.base else masks.base.revision)
    check_not_base(options.out.absolute(), source)
    size = None
    if source.kind != "gguf":  # whose size as a directory is not known yet
        base = open_base(source)
        # Fitted weights wait beside the directory until it is written.
        size = needed_bytes(base) + base.nbytes
    check_destination(options.out, size, overwrite=options.overwrite)
    return masks, source


def _text(source: ModelSource, options: RefitOptions) -> tuple[Calibration, dict[str, object]]:
    """The windows, and what the sidecar says of them."""
    device = choose_device(options.device)
    data = calibration_data(source, options, device, options.trust_remote_code)
    longest = max_positions(load_config(source, options.trust_remote_code))
    windows = calibration_windows(data, options.windows, longest)
    calibration = Calibration(windows, device=device, offload_dir=options.offload_dir, seed=options.seed)
    return calibration, text_facts(data, options)


def _show(spec: str, method: Refit) -> None:
    rows = [
        [str(index), f"{before:.4f}", f"{after:.4f}", f"{after / before:.0%}" if before else ""]
        for index, (before, after) in method.errors.items()
    ]
    print_table(["block", "error before", "after", "of it"], rows, f"{spec}, blocks refitted")
