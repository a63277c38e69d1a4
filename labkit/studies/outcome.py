"""What a run came to, in the three lines that everything else explains: the result, its grade, and the machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from labkit.statistics import Trust


@dataclass(frozen=True)
class Outcome:
    """The result in a line, how far it can be trusted, in words and as a yes or no, and what it was measured on.

    `of`: the settings of the result, as far as the request had others.
    """

    claim: str
    grade: str
    trusted: bool
    machine: str
    of: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def graded(cls, claim: str, trust: Trust, machine: str) -> Outcome:
        """Of a result with a grade."""
        return cls(claim, trust.sentence or "trustworthy", trust.trustworthy, machine)
