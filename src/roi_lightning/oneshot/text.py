"""The calibration windows of one-shot pruning."""

from torch import Tensor

from roi_lightning.data import CalibrationDataModule
from roi_lightning.errors import UserError


def calibration_windows(data: CalibrationDataModule, count: int, longest: int | None) -> Tensor:
    """Windows of calibration text.

    Args:
        data: The text.
        count: How many windows.
        longest: Tokens the model was made for, None if it does not say.

    Returns:
        Token ids, int64 [count, seq_len].

    Raises:
        UserError: If the text holds fewer windows, or a window more tokens than the model takes.
    """
    if longest is not None and data.seq_len > longest:
        raise UserError(
            f"windows of {data.seq_len} tokens are longer than the model's {longest}; lower --seq_len"
        )
    windows = data.windows("train", count)
    available = data.train_tokens // data.seq_len
    if 0 < available < count:  # streamed text has no length
        raise UserError(
            f"the calibration text holds {available} windows of {data.seq_len} tokens, {count} are asked for; "
            "give more text, or lower --windows or --seq_len"
        )
    return windows
