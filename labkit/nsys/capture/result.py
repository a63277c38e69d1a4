"""The result of a profiled run, and the errors of a run without a full result."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from labkit.nsys.capture.record import CaptureRecord
from labkit.nsys.reader.reading import read
from labkit.nsys.trace import Trace
from labkit.system.errors import RunError


@dataclass(frozen=True)
class Capture:
    """The files of a profiled run."""

    files: tuple[Path, ...]  # one, or one for each rank
    record_file: Path  # next to the first
    record: CaptureRecord

    def trace(self) -> Trace:
        """The capture as frames, read once and then from the cache."""
        return read(self.files)


class CaptureError(RunError):
    """Nothing usable was captured. The message names the cause."""


class CommandFailedError(CaptureError):
    """The command failed. `capture` holds the files captured before; None without any."""

    def __init__(self, message: str, exit_code: int, capture: Capture | None) -> None:
        super().__init__(message)
        self.exit_code, self.capture = exit_code, capture


class CaptureInterrupted(KeyboardInterrupt):
    """Ctrl-C. `capture` holds the files captured before; None without any."""

    def __init__(self, capture: Capture | None) -> None:
        super().__init__()
        self.capture = capture
