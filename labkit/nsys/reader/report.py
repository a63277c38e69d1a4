"""Reads a report of nsys (.nsys-rep): lets the installed nsys export it, and reads the export."""

from __future__ import annotations

import os
import shlex
import tempfile
from dataclasses import replace
from pathlib import Path

from labkit.nsys.process import run
from labkit.nsys.reader.sqlite import read_sqlite
from labkit.nsys.tool import find_nsys
from labkit.nsys.trace import Trace, TraceError

EXPORT = ("nsys", "export", "--type", "sqlite")


def read_report(path: Path) -> Trace:
    """The trace of a report. TraceError if nsys is missing, or cannot export this report."""
    by_hand = f"export it where it was recorded, and read the .sqlite: {shlex.join([*EXPORT, path.name])}"
    nsys = find_nsys()
    if nsys is None:
        raise TraceError(f"{path.name} is a report that only nsys reads, and nsys is not installed; {by_hand}")
    with tempfile.TemporaryDirectory(prefix="labkit-export-") as folder:
        export = Path(folder, "report.sqlite")
        command = [str(nsys.path), *EXPORT[1:], "--output", str(export), str(path.resolve())]
        ended = run(command, os.environ)
        if not ended.well or not export.exists():
            output = ended.said or (f"exit code {ended.exit_code}",)
            raise TraceError(
                f"{path.name}: nsys {nsys.version_text} cannot export it ({output[-1]}); a report of a newer version "
                f"needs that version: {by_hand}"
            )
        trace = read_sqlite(export)
    return replace(trace, source=replace(trace.source, files=(path.name,)))
