"""Finds the rank to blame when several fail: most of the others only lost their connection to it."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable
from dataclasses import dataclass

LOST_CONNECTION = re.compile(
    r"Connection (closed|reset|refused)|Broken pipe|[Tt]imed out|remote process|DistNetworkError|recvValue failed"
    r"|LostRankError|RankFailedError"
)


@dataclass(frozen=True)
class RankFailure:
    """How a rank ended."""

    rank: int
    exit_code: int | None  # None: the rank left its exception in a file, or torchrun ended it because of another rank
    said: str  # its traceback or last lines
    at: float  # time, on a clock that all ranks of this machine share

    @property
    def was_killed(self) -> bool:
        return self.exit_code is not None and self.exit_code < 0 and self.exit_code != -signal.SIGTERM

    @property
    def lost_connection(self) -> bool:
        """Whether it failed because another rank had ended or failed."""
        return LOST_CONNECTION.search(last_line(self.said)) is not None


def to_blame(failures: Iterable[RankFailure]) -> RankFailure:
    """The first cause: a rank that was killed or crashed, else the first that did not just lose its connection."""
    return min(failures, key=lambda failure: (not failure.was_killed, failure.lost_connection, failure.at))


def how_it_ended(exit_code: int) -> str:
    """Returns "exit code 3" or "killed by SIGSEGV"."""
    if exit_code >= 0:
        return f"exit code {exit_code}"
    try:
        return f"killed by {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"killed by signal {-exit_code}"


def last_line(text: str) -> str:
    """The last line that is not empty; in a traceback this is the error."""
    return next((line for line in reversed(text.splitlines()) if line.strip()), "")
