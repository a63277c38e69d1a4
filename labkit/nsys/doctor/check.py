"""One finding of the doctor."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Status(StrEnum):
    OK = "OK"
    WARN = "WARN"
    FAIL = "FAIL"


@dataclass(frozen=True)
class DoctorCheck:
    """One check: its name, its finding and, for a problem, the one line that repairs it. `figures`: of the finding, for
    programs.
    """

    name: str
    status: Status
    finding: str
    repair: str | None = None
    figures: tuple[dict[str, Any], ...] = ()
