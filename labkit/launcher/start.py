"""Time limit for the ranks of a run to start and to meet, and the message about ranks that exceed it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from labkit.system.errors import UserError

START_S = 60.0
START_TIMEOUT = "LABKIT_START_TIMEOUT"  # in seconds, instead of START_S


def start_timeout(environment: Mapping[str, str] = os.environ) -> float:
    """The limit from the environment, in seconds. Raises ValueError if it is not a number above 0."""
    text = environment.get(START_TIMEOUT)
    try:
        seconds = START_S if text is None else float(text)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < float("inf"):
        raise UserError(f"got {START_TIMEOUT}={text}, expected a number of seconds above 0")
    return seconds


def not_met(missing: Sequence[int], timeout_s: float) -> str:
    """The message about ranks for which the others have waited in vain."""
    subject = f"ranks {', '.join(map(str, missing))} have" if len(missing) > 1 else f"rank {missing[0]} has"
    return (
        f"{subject} not met the others within {timeout_s:g} s: ended early, stopped, or slow to start; set the limit "
        f"by labkit launch --start-timeout, labkit.launch(start_timeout_s=...) or {START_TIMEOUT}"
    )
