"""How often a window reduces, if nothing promises its last backward."""

from collections.abc import Sequence

from zerosync_strategy.core.gradients.last_backward import LastBackward


def passes(backwards: Sequence[int], first: int = 1) -> list[int]:
    """By window, the reductions of ranks that all make so many ``backwards``; the first window expects ``first``."""
    last, found = LastBackward(True, first), []
    for count in backwards:
        for _ in range(count):
            last.begin(last.is_next())
        surprises = last.began and not last.is_running
        found.append(1 + surprises)
        for left in (True, False) if surprises else (False,):
            last.hear((1, count, count**2, left, False))
        last.stepped()
    return found
