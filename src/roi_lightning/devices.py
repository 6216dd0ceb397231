"""The device that a plain command runs on."""

import torch

from roi_lightning.errors import UserError


def choose_device(name: str = "auto") -> torch.device:
    """The device of a name.

    Args:
        name: `cpu`, `cuda`, `cuda:N`, or `auto` for a GPU where there is one.

    Raises:
        UserError: If the name is none of these or the machine has no such device.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "auto":
        return torch.device("cuda" if gpus else "cpu")
    if name == "cpu" or (name == "cuda" and gpus):
        return torch.device(name)
    kind, _, number = name.partition(":")
    if kind == "cuda" and number.isdigit() and int(number) < gpus:
        return torch.device(name)
    raise UserError(f"--device {name!r}: use auto, cpu, cuda or cuda:N; this machine has {gpus} GPUs")
