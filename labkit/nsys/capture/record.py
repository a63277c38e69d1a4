"""The record of a capture: a JSON file next to it that says how it was made."""

from __future__ import annotations

import re
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict, Field, ValidationError

from labkit.nsys.capture.tax import Tax
from labkit.nsys.trace import TraceError
from labkit.statistics import Trust
from labkit.statistics.trust import AGAIN, load_doubts
from labkit.system.input_file import read_file
from labkit.system.validation import Listed, first_problem

SUFFIX, OF_RANK = re.compile(r"\.(sqlite|json\.gz)$"), re.compile(r"-r\d+$")


class CaptureRecord(Listed):
    """One capture: the command, the case, the profiler, the machine, and the cost of profiling."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: Literal[1] = 1
    created: datetime
    files: tuple[str, ...]  # in the record's folder
    command: tuple[str, ...]
    case: dict[str, Any]  # the caller's description of the run: impl, model, dtype, ...
    window: str | None  # the range that was captured; None: the whole run
    profiler: str  # "nsys 2022.4.2.1" or "torch.profiler 2.13.0"
    exit_code: int
    seconds: float  # of the profiled run
    tax: Tax | None
    environment: dict[str, Any] | None
    taken_cores: float | None = None  # processors that other programs took from the run; None: not known
    remarks: tuple[str, ...] = ()
    # By the name of a variable, or of another secret of the run: the number of texts that held its value.
    redacted: dict[str, int] = Field(default_factory=dict)

    @property
    def trust(self) -> Trust:
        """The trust in the capture's times, by the load of the machine during the run."""
        return Trust(tuple(load_doubts([] if self.taken_cores is None else [self.taken_cores], AGAIN)))


def read_record(path: Path) -> CaptureRecord:
    """The record of a capture. Raises TraceError for a file that is not a record."""
    try:
        return CaptureRecord.model_validate_json(read_file(path, "the record of a capture"))
    except ValidationError as error:
        raise TraceError(
            f"{path} is not a record of a capture, schema version 1: {first_problem(error, 'the file')}; "
            "expected the JSON file that labkit profile writes"
        ) from None


def record_file_beside(capture: Path) -> tuple[Path, CaptureRecord] | None:
    """The record next to a capture, with its path; None for a file that labkit profile did not write."""
    stem = SUFFIX.sub("", capture.name)
    for name in (stem, OF_RANK.sub("", stem)):
        path = capture.parent / f"{name}.json"
        with suppress(OSError, TraceError):
            record = read_record(path)
            if capture.name in record.files:
                return path, record
    return None


def record_beside(capture: Path) -> CaptureRecord | None:
    """The record next to a capture; None for a file that labkit profile did not write."""
    pair = record_file_beside(capture)
    return pair and pair[1]
