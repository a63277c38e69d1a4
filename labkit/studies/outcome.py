"""What a run came to, in the three lines that everything else explains: the result, its grade, and the machine; and
below them a row for each thing that was measured.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from labkit.statistics import Trust
from labkit.system.result_table import Claim, ResultTable, Tabular

if TYPE_CHECKING:
    import pandas as pd

MOST_ROWS = 20  # of a table


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
        """The outcome of a result with a grade."""
        return cls(claim, trust.sentence or "trustworthy", trust.trustworthy, machine)


class Study(Tabular):
    """What a notebook shows. Its frame has a row for each thing that was measured, its table the same and the claim."""

    @property
    @abstractmethod
    def outcome(self) -> Outcome:
        """The result, its grade and the machine."""

    @abstractmethod
    def case(self) -> dict[str, Any]:
        """What all rows have in common: model, dtype, batch, prompt and so on."""

    @abstractmethod
    def rows(self) -> list[dict[str, Any]]:
        """A row for each thing that was measured, all of the same columns."""

    def to_frame(self) -> pd.DataFrame:
        """The rows, each with the case and the machine."""
        import pandas as pd  # half a second, which is not for every process that measures

        head = {"machine": self.outcome.machine, **self.case()}
        return pd.DataFrame([head | row for row in self.rows()])

    def table(self) -> ResultTable:
        """The first rows, and what may be claimed of them."""
        rows, outcome = self.rows(), self.outcome
        more = [f"{len(rows) - MOST_ROWS:,} more rows in to_frame()"] if len(rows) > MOST_ROWS else []
        title = ", ".join(f"{name} {value}" if name != "model" else str(value) for name, value in self.case().items())
        claim = Claim("TRUSTWORTHY", "bold green", outcome.claim)
        if not outcome.trusted:
            claim = Claim("NOT TRUSTWORTHY", "bold red", outcome.claim)
        return ResultTable(
            title=title,
            columns=tuple(name.replace("_", " ") for name in (rows[0] if rows else {})),
            rows=tuple(tuple(map(_cell, row.values())) for row in rows[:MOST_ROWS]),
            claim=claim,
            notes=(*more, outcome.grade, f"machine: {outcome.machine}"),
        )


def _cell(value: object) -> str:
    if value is None:
        return "–"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
