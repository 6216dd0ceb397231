"""Which way is the quickest for how many rows."""

from collections.abc import Mapping


def quicker(ratios: Mapping[int, float]) -> list[tuple[int, int]]:
    """Stretches of measured rows, first and last, in which every ratio is above 1.

    Args:
        ratios: Speed ÷ the reference's speed, by rows.
    """
    stretches: list[tuple[int, int]] = []
    before = False
    for rows, ratio in sorted(ratios.items()):
        now = ratio > 1
        if now:
            stretches.append((stretches.pop()[0] if before else rows, rows))
        before = now
    return stretches


def best_way(seconds: Mapping[str, float], chosen: float) -> tuple[str, float]:
    """The quickest way, and the time of the choice ÷ its time.

    Args:
        seconds: Of every way, by name.
        chosen: Of the automatic choice among them.
    """
    best = min(seconds, key=lambda way: seconds[way])
    return best, chosen / seconds[best]
