"""Options that take several numbers."""

from roi_lightning.errors import UserError


def numbers(option: str, text: str, example: str) -> list[int]:
    """Positive whole numbers with commas between them.

    Raises:
        UserError: If the text is anything else; the message names the option and shows the example.
    """
    try:
        found = [int(float(part)) for part in text.split(",")]
    except (ValueError, OverflowError):
        found = []
    if not found or min(found) < 1:
        raise UserError(f"{option} {text!r}: give positive whole numbers, like {example}")
    return found
