"""Errors of notebooks that cannot be run, and of runs that failed."""

from dataclasses import dataclass

from labkit.system.errors import UserError


class NotebookError(UserError):
    """A notebook that cannot be run as requested."""


@dataclass(frozen=True)
class Failure:
    """The cell at which a run ended, and why."""

    cell: int  # position in the executed notebook, counted from 1, text cells included
    code: str  # the cell's first line
    reason: str

    def __str__(self) -> str:
        return f"cell {self.cell} ({self.code}): {self.reason}"
