"""One finding of the doctor."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Status(StrEnum):
    OK = "OK"
    WARN = "WARN"
    FAIL = "FAIL"


@dataclass(frozen=True)
class DoctorCheck:
    """One check: its name, its finding and, for a problem, the one line that repairs it."""

    name: str
    status: Status
    finding: str
    repair: str | None = None
