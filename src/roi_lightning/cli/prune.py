"""`prune LM --method METHOD --pattern N:M --out DIR`: a mask without training."""

import sys
import time
from dataclasses import fields

from roi_lightning.cli.arguments import PruneOptions
from roi_lightning.data import CalibrationDataModule
from roi_lightning.export import check_destination, check_not_base, needed_bytes, write_export
from roi_lightning.masks.mask_set import MaskSet
from roi_lightning.models.base_tensors import BaseTensors, open_base
from roi_lightning.models.config import load_config
from roi_lightning.models.loading import load_language_model, meta_language_model
from roi_lightning.models.source import resolve_model
from roi_lightning.oneshot.config import PruneConfig
from roi_lightning.oneshot.prune import TensorStore, calibration_text, prune_model
from roi_lightning.utils.devices import choose_device
from roi_lightning.utils.tables import print_table


def main(options: PruneOptions) -> None:
    """Prune, write, verify, and say what was done.

    Raises:
        UserError: For anything that can't be pruned, read or written.
    """
    config = PruneConfig(**{field.name: getattr(options, field.name) for field in fields(PruneConfig)})
    source, trusted = resolve_model(options.lm, options.revision), options.trust_remote_code
    shapes = meta_language_model(load_config(source, trusted), trusted)
    config.layers(source.spec, shapes)
    check_not_base(options.out.absolute(), source)
    _check_space(options, config, None if source.kind == "gguf" else open_base(source))
    globs = {"targets": options.targets, "ignore": options.ignore}
    asked = {name: " ".join(each) for name, each in globs.items() if tuple(each) not in (("*",), ())}
    facts = {"method": config.method_name, **config.chosen.facts(), **asked}
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

    calibration = config.calibration(source.spec, shapes, text)
    lm = load_language_model(source, options.dtype, trusted, device=device)
    base = open_base(source, options.dtype, lm)
    if source.kind == "gguf":  # its size as a directory is known only now
        _check_space(options, config, base)
    started = time.monotonic()
    with TensorStore.beside(options.out) as updates:
        layers = config.layers(source.spec, lm)
        masks = prune_model(base, lm, layers, config.chosen, calibration, updates.put)
        facts["seconds"] = round(time.monotonic() - started, 1)
        out = write_export(
            base, masks, options.out, updates=updates, training=facts, overwrite=options.overwrite
        )
    _show(facts, masks)
    sys.stdout.write(f"{out}: written and verified\n")


def _check_space(options: PruneOptions, config: PruneConfig, base: BaseTensors | None) -> None:
    """Refuse a place that can't take the result, as far as its size is known."""
    size = None if base is None else needed_bytes(base)
    # Updated weights wait beside the directory until it is written.
    if base is not None and config.chosen.updates_weights:
        size = needed_bytes(base) + base.nbytes
    check_destination(options.out, size, overwrite=options.overwrite)


def _show(facts: dict[str, object], masks: MaskSet) -> None:
    rows = [[name, str(value)] for name, value in facts.items()]
    rows.append(["kept", f"{masks.amount} weights in {len(masks.layers) + len(masks.dense)} layers"])
    rows.append(["updated", f"kept weights of {len(masks.updated)} layers" if masks.updated else "no weight"])
    print_table(["", ""], rows, f"{masks.base.spec} at {masks.pattern}", left=2)
