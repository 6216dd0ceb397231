"""The calibration text of commands that measure a model's layers on it."""

from collections.abc import Sequence
from typing import Protocol

from roi_lightning.data import CalibrationDataModule, Corpus, parse_corpus
from roi_lightning.models.source import ModelSource


class TextOptions(Protocol):
    """What such a command is told of its text."""

    @property
    def corpora(self) -> Sequence[str]:
        """What to read, see `parse_corpus`."""

    @property
    def windows(self) -> int:
        """How many windows."""

    @property
    def seq_len(self) -> int:
        """Tokens of each."""

    @property
    def seed(self) -> int:
        """Of their choice."""


def calibration_data(
    source: ModelSource, options: TextOptions, trust_remote_code: bool = False
) -> CalibrationDataModule:
    """Text in a model's tokens, none of it held out.

    Args:
        source: The model, whose tokenizer is used.
        options: What to read.
        trust_remote_code: Run the model repository's code.

    Raises:
        UserError: For a corpus that makes no sense.
    """
    corpora: list[Corpus | str] = [parse_corpus(text) for text in options.corpora]
    return CalibrationDataModule(
        source.spec,
        tokenizer_revision=source.revision,
        trust_remote_code=trust_remote_code,
        corpora=corpora,
        val_corpora=corpora,  # so that all of what is given is for calibration
        seq_len=options.seq_len,
        seed=options.seed,
    )


def text_facts(data: CalibrationDataModule, options: TextOptions) -> dict[str, object]:
    """What a sidecar says of the text."""
    return {
        "text": ", ".join(corpus.source for corpus in data.corpora),
        "seed": options.seed,
        "windows": options.windows,
        "seq_len": options.seq_len,
        "tokens": options.windows * options.seq_len,
    }
