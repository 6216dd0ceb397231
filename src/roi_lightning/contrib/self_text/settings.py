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
        tokens: Tokens to write at least, in all documents together.
        max_tokens: Tokens in the longest document; a document that has not ended by then is kept as it is.
        seed: Seed of the draws; every document derives a seed of its own from it.
        start: Token that each document follows; if left out, the BOS that the tokenizer puts before a text, or its
            EOS if it puts none.

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
