"""By which way the packed layers of a model multiply how many rows, settled before they are used."""

from collections.abc import Mapping

from roi_lightning.runtime.candidates import tell_reasons
from roi_lightning.runtime.gpu_products import choice_for
from roi_lightning.runtime.large_batches import pack_for_large_batches, why_not
from roi_lightning.runtime.packed_linear import PackedLinear


def choose_ways(packed: Mapping[str, PackedLinear], large_batches: bool) -> None:
    """Measure now what a product would measure when it is first taken.

    Args:
        packed: The layers by name, on their final device.
        large_batches: Pack each once more, see `accelerate`; those that can't be are logged.
    """
    reasons: dict[str, str] = {}
    for name, layer in packed.items():
        if layer.values.is_cuda:
            choice_for(layer.packed)
        if large_batches:
            reason = why_not(layer.packed)
            if reason is None:
                layer.large = pack_for_large_batches(layer.packed)
            else:
                reasons[name] = reason
    tell_reasons(reasons, len(packed), "are not packed for large batches")
