"""What a profiled run leaves, and the errors of one that leaves less than was asked for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from labkit.nsys.capture.record import CaptureRecord
from labkit.nsys.reader.reading import read
from labkit.nsys.trace import Trace
from labkit.system.errors import RunError


@dataclass(frozen=True)
class Capture:
    """What a profiled run left: `files`, one or one for each rank, and the record beside the first."""

    files: tuple[Path, ...]
    record_file: Path
    record: CaptureRecord

    def trace(self) -> Trace:
        """The capture as frames, read once and then from the cache."""
        return read(self.files)


class CaptureError(RunError):
    """Nothing usable was captured. The message says which of the known causes it was."""


class CommandFailedError(CaptureError):
    """The command failed. `capture` is what was captured before, None if nothing was."""

    def __init__(self, message: str, exit_code: int, capture: Capture | None) -> None:
        super().__init__(message)
        self.exit_code, self.capture = exit_code, capture


class CaptureInterrupted(KeyboardInterrupt):
    """Ctrl-C. `capture` is what was captured before, None if nothing was."""

    def __init__(self, capture: Capture | None) -> None:
        super().__init__()
        self.capture = capture
