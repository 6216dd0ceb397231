"""Find, without a GPU, where the host would wait for one."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

# What the host reads, and what has as many elements as values of its input say.
_READS = {"_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select", "_unique2", "bincount"}


class NoWaits(TorchDispatchMode):
    """Refuses every operation for which the host would wait for the device."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        by_mask = func is torch.ops.aten.index.Tensor and any(
            place is not None and place.dtype == torch.bool for place in args[1]
        )
        assert not by_mask, "indexing by a boolean tensor waits"
        assert func._schema.name.removeprefix("aten::") not in _READS, f"{func} waits"
        return func(*args, **(kwargs or {}))
