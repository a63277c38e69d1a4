"""How many steps a turn has: enough that its first step, which does not count, is the smaller part of its time."""

from __future__ import annotations

import math

TURN_MS = 30  # of the fastest side: longer than the first step, and shorter than the memory keeps its rate
FEWEST_STEPS, MOST_STEPS = 3, 24  # of a turn; the first one does not count


def usual_steps(fastest_ms: float) -> int:
    """The steps of a turn, for the fastest step of all sides."""
    return min(max(1 + math.ceil(TURN_MS / fastest_ms), FEWEST_STEPS), MOST_STEPS)


def next_steps(left: int, usual: int) -> int:
    """The steps of the next turn, if a generation has `left` more: the last turn takes all of them, so that none is too
    short.
    """
    return left if left < usual + FEWEST_STEPS - 1 else usual
