"""The device that a plain command runs on."""

import torch

from roi_lightning.errors import UserError


def choose_device(name: str = "auto") -> torch.device:
    """A device by name.

    Args:
        name: `auto` for a CUDA device where there is one, else as torch spells it (`cpu`, `cuda:1`).

    Raises:
        UserError: If there is no such device.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"device {name!r} can't be used: {reason}") from error
    return device
