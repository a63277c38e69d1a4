"""Why a run of a notebook failed."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Failure:
    """The cell at which a run ended, and why."""

    cell: int  # position in the executed notebook, counted from 1, text cells included
    code: str  # the cell's first line
    reason: str

    def __str__(self) -> str:
        return f"cell {self.cell} ({self.code}): {self.reason}"
