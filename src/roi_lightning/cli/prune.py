"""`prune LM --method METHOD --pattern N:M --out DIR`: a mask without training."""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from roi_lightning.cli.options import parse_options
from roi_lightning.data import CalibrationDataModule
from roi_lightning.export import check_destination, check_not_base, needed_bytes, write_export
from roi_lightning.masks.mask_set import MaskSet
from roi_lightning.models.base_tensors import BaseTensors, open_base
from roi_lightning.models.config import DType, load_config
from roi_lightning.models.loading import load_language_model, meta_language_model
from roi_lightning.models.source import resolve_model
from roi_lightning.oneshot import TensorStore, calibration_text, prune_model
from roi_lightning.oneshot.config import PruneConfig
from roi_lightning.utils.devices import choose_device
from roi_lightning.utils.tables import print_table


@dataclass(frozen=True, kw_only=True)
class PruneOptions(PruneConfig):
    """Choose N of every M weights without training, layer after layer.

    Writes the same kind of directory and mask file as fit.

    Attributes:
        lm: Hub id, directory, or GGUF file.
        out: The directory to write.
        overwrite: Replace an earlier export there.
        corpora: Calibration text, as in data.corpora: files, globs, hub ids, python-docs, or mappings like
            '{source: x.jsonl, text_field: body}'; for chats '{source: x.jsonl, messages_field: messages}'.
        revision: Branch, tag or commit of a hub id.
        dtype: Number type that the model runs in, and that a GGUF model is saved in; auto takes the stored type, and
            bfloat16 for GGUF.
        trust_remote_code: Let the model repository's own Python code run.
    """

    lm: str = field(kw_only=False)
    method: str = field()
    out: Path
    overwrite: bool = False
    corpora: Sequence[str] = ("python-docs",)
    revision: str | None = None
    dtype: DType = "auto"
    trust_remote_code: bool = False

    def check_space(self, base: BaseTensors | None) -> None:
        """Refuse a place that can't take the result, as far as its size is known."""
        size = None if base is None else needed_bytes(base)
        # Updated weights wait beside the directory until it is written.
        if base is not None and self.chosen.updates_weights:
            size = needed_bytes(base) + base.nbytes
        check_destination(self.out, size, overwrite=self.overwrite)


def main(argv: Sequence[str]) -> int:
    """Prune, write, verify, and say what was done.

    Returns:
        0.

    Raises:
        UserError: For anything that can't be pruned, read or written.
    """
    options = parse_options(PruneOptions, "prune", argv)
    source, trusted = resolve_model(options.lm, options.revision), options.trust_remote_code
    shapes = meta_language_model(load_config(source, trusted), trusted)
    options.layers(source.spec, shapes)
    check_not_base(options.out.absolute(), source)
    options.check_space(None if source.kind == "gguf" else open_base(source))
    facts = {"method": options.method_name, **options.chosen.facts(), **_selection(options)}
    device = choose_device(options.device)

    def text() -> CalibrationDataModule:
        data = calibration_text(
            source.spec,
            options.corpora,
            options.seq_len,
            options.seed,
            tokenizer_revision=source.revision,
            trust_remote_code=trusted,
        )
        facts.update({"activations": options.activations, "windows": options.windows, "seed": options.seed})
        facts.update(data.facts(options.windows))
        return data

    calibration = options.calibration(source.spec, shapes, text)
    lm = load_language_model(source, options.dtype, trusted, device=device)
    base = open_base(source, options.dtype, lm)
    if source.kind == "gguf":  # its size as a directory is known only now
        options.check_space(base)
    started = time.monotonic()
    with TensorStore.beside(options.out) as updates:
        layers = options.layers(source.spec, lm)
        masks = prune_model(base, lm, layers, options.chosen, calibration, updates.put)
        facts["seconds"] = round(time.monotonic() - started, 1)
        out = write_export(
            base, masks, options.out, updates=updates, training=facts, overwrite=options.overwrite
        )
    _show(facts, masks)
    sys.stdout.write(f"{out}: written and verified\n")
    return 0


def _selection(options: PruneOptions) -> dict[str, object]:
    """Which layers were asked for, where that was not all."""
    chosen = {"targets": options.targets, "ignore": options.ignore}
    return {name: " ".join(globs) for name, globs in chosen.items() if tuple(globs) not in (("*",), ())}


def _show(facts: dict[str, object], masks: MaskSet) -> None:
    rows = [[name, str(value)] for name, value in facts.items()]
    rows.append(["kept", f"{masks.amount} weights in {len(masks.layers) + len(masks.dense)} layers"])
    rows.append(["updated", f"kept weights of {len(masks.updated)} layers" if masks.updated else "no weight"])
    print_table(["", ""], rows, f"{masks.base.spec} at {masks.pattern}", left=2)
