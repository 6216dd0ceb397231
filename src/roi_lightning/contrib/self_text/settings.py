"""Which documents a model writes, and where the facts about them are; importing this does not import torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from roi_lightning.errors import UserError

BATCH_SIZE: Final = 32


@dataclass(frozen=True, kw_only=True)
class SampleSettings:
    """Which documents a model writes.

    Attributes:
        tokens: Of all documents together, at least.
        max_tokens: Of one document; one that the model has not ended by then is kept as it is.
        seed: Of the draws; each document has its own, whatever is sampled beside it.
        start: The token that a document follows; without it the BOS that the tokenizer puts before a text, or where
            it puts none its EOS, which stands between documents.

    Raises:
        UserError: For numbers out of range.
    """

    tokens: int = 300_000
    max_tokens: int = 1024
    seed: int = 0
    start: str | None = None

    def __post_init__(self) -> None:
        for name, minimum in (("tokens", 1), ("max_tokens", 1), ("seed", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or value < minimum:  # a mapping on a command line may hold anything
                raise UserError(
                    f"{name} of sampled text is {value!r}; give a whole number of at least {minimum}"
                )


def about(out: Path) -> Path:
    """Where the facts about a file of documents are."""
    return out.with_name(f"{out.stem}.about.json")
