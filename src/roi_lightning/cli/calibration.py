"""The calibration text of commands that measure a model's layers on it."""

from collections.abc import Sequence

import torch

from roi_lightning.data import CalibrationDataModule, Corpus, parse_corpus


def calibration_data(
    lm: str,
    corpora: Sequence[str],
    *,
    seq_len: int,
    seed: int,
    device: torch.device,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> CalibrationDataModule:
    """Text in a model's tokens, none of it held out.

    Args:
        lm: The model, whose tokenizer is used.
        corpora: What to read, see `parse_corpus`.
        seq_len: Tokens of a window.
        seed: Of the choice of windows.
        device: Where the model writes text, if it is to.
        revision: Of a hub model.
        trust_remote_code: Run the model repository's code.

    Raises:
        UserError: For a corpus that makes no sense.
    """
    parsed: list[Corpus | str] = [parse_corpus(text) for text in corpora]
    data = CalibrationDataModule(
        lm,
        tokenizer_revision=revision,
        trust_remote_code=trust_remote_code,
        corpora=parsed,
        val_corpora=parsed,  # so that all of what is given is for calibration
        seq_len=seq_len,
        seed=seed,
    )
    data.use_device(device)
    return data
