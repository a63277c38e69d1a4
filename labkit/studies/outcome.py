"""The outcome of a run in three lines, the result, its grade and the machine, and a row for each measurement."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from labkit.statistics import Trust
from labkit.system.result_table import Claim, ResultTable, Tabular, frame_of

if TYPE_CHECKING:
    import pandas as pd

MOST_ROWS = 20  # of a table


@dataclass(frozen=True)
class Outcome:
    """The outcome of a run."""

    claim: str  # the result in one line
    grade: str  # of trust, in words
    trusted: bool
    machine: str
    of: Mapping[str, Any] = field(default_factory=dict)  # settings of the result that differ from the request

    @classmethod
    def graded(cls, claim: str, trust: Trust, machine: str) -> Outcome:
        """The outcome of a result with a grade."""
        return cls(claim, trust.sentence or "trustworthy", trust.trustworthy, machine)


@dataclass(frozen=True)
class Notes:
    """A result on the points that its notebook asks a reader to notice."""

    sentences: tuple[str, ...]  # in Markdown
    doubts: tuple[str, ...]  # reasons against trusting the result


class Study(Tabular):
    """A result that a notebook shows. Its frame has a row for each measurement; its table also has the claim."""

    @property
    @abstractmethod
    def outcome(self) -> Outcome:
        """The result, its grade and the machine."""

    @abstractmethod
    def case(self) -> dict[str, Any]:
        """The settings that all rows share: model, dtype, batch, prompt and so on."""

    @abstractmethod
    def rows(self) -> list[dict[str, Any]]:
        """A row for each measurement, all with the same columns."""

    def to_frame(self) -> pd.DataFrame:
        """The rows, each with the case and the machine."""
        head = {"machine": self.outcome.machine, **self.case()}
        return frame_of([head | row for row in self.rows()])

    def table(self) -> ResultTable:
        """The first rows, and the claim."""
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
