"""Opens traces of any profiler, and puts the traces of several ranks on one clock."""

from __future__ import annotations

import os
import re
import shlex
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pandas as pd
from pandas.api.types import union_categoricals

from labkit.nsys.kept_results import Packed, Unpacked, kept
from labkit.nsys.process import run
from labkit.nsys.reader.chrome import GZIP, read_chrome
from labkit.nsys.reader.json_text import BOM
from labkit.nsys.reader.limits import rank_number
from labkit.nsys.reader.sqlite import read_sqlite
from labkit.nsys.tool import find_nsys
from labkit.nsys.trace import SCHEMA, EmptyTraceError, Source, Trace, TraceError, typed
from labkit.system.first_bytes import first_bytes, instead_of_content
from labkit.system.home import expanded
from labkit.system.shown import shown_value

SQLITE = b"SQLite format 3\0"
STREAM, REPORT = b"NVIDIA Nsight Systems Stream", b"NVIDIA Tegra Profiler Report"
RANK = re.compile(r"(?:^|[^a-z])r(?:ank)?[-_.]?(\d+)(?:[^a-z0-9]|$)", re.IGNORECASE)
EXPECTED = (
    "expected a .sqlite export or a .nsys-rep report of nsys, or a Chrome trace of torch.profiler (.json, .json.gz)"
)

EXPORT = ("nsys", "export", "--type", "sqlite")
SUFFIXES = (".sqlite", ".nsys-rep", ".json", ".json.gz")

PathLike = str | os.PathLike[str]


def read(paths: PathLike | Sequence[PathLike], *, cache: bool = True) -> Trace:
    """The trace in a file, or in several, such as one per rank.

    A file is a SQLite export of nsys, a report of nsys (which the installed nsys exports first), or a Chrome trace
    (JSON, gzip). Its kind is known by its contents, not by its name. Several files are put on one clock by their start
    times. A file without a start time is noted in `source.skipped`, like everything that was left out. The rank comes
    from a Chrome trace itself, else from the file's name ("run-r3.sqlite", "rank_3.json"). Later reads of the same
    contents come from a cache (`LABKIT_CACHE`, ~/.cache/labkit). Raises TraceError for an unusable trace, and
    EmptyTraceError for a trace without a range, call or operation.
    """
    files = [expanded(path) for path in ([paths] if isinstance(paths, str | os.PathLike) else paths)]
    if not files:
        raise TraceError(f"got no file; {EXPECTED}")
    traces = [_read_one(path, cache) for path in files]
    return traces[0] if len(traces) == 1 else _joined(traces)


def _read_one(path: Path, cache: bool) -> Trace:
    reader = _reader(path)
    trace = reader(path) if not cache else kept([path], "trace", lambda: reader(path), pack=_packed, unpack=_unpacked)
    trace = replace(trace, source=replace(trace.source, files=(path.name,)))
    if not (len(trace.ranges) or len(trace.operations) or len(trace.calls)):
        contents = "; ".join(filter(None, [", ".join(trace.source.unread), *trace.source.skipped])) or "it has no event"
        raise EmptyTraceError(
            f"nothing in {path.name} can be read ({contents}); expected ranges, calls, or work of a device: "
            "record again with one of these"
        )
    rank = RANK.search(path.name)
    if rank and (trace.processes["rank"] == -1).all():
        number = rank_number(rank[1], f"the name of {path.name}")
        return replace(trace, processes=trace.processes.assign(rank=np.int32(number)))
    return trace


def _packed(trace: Trace) -> Packed:
    return Packed(asdict(trace.source), trace.frames)


def _unpacked(result: Unpacked) -> Trace:
    """The trace. Its columns are not copied, but stay in the file's pages."""
    frames = {}
    for name, columns in SCHEMA.items():
        arrays: dict[str, object] = {}
        for column, dtype in columns.items():
            kept_column = result.batches[name].column(column)
            if dtype == "category":
                texts = pd.Index(kept_column.dictionary.to_pylist(), dtype="str")
                arrays[column] = pd.Categorical.from_codes(kept_column.indices.to_numpy(), texts)
            else:
                arrays[column] = kept_column.to_numpy(zero_copy_only=dtype != "bool")
        frames[name] = typed(name, arrays)
    return Trace(Source.kept(result.about), **frames)


def _reader(path: Path) -> Callable[[Path], Trace]:
    """The reader for this file, chosen by its first bytes."""
    if path.is_dir():
        inside = sorted(file.name for file in path.iterdir() if file.name.endswith(SUFFIXES))
        raise TraceError(f"{path} is a folder; name the files in it ({', '.join(inside) or 'no trace is there'})")
    if not path.exists():
        raise TraceError(f"got {path}, which does not exist; {EXPECTED}")
    head = first_bytes(path, "a trace")
    if head.startswith(SQLITE):
        return read_sqlite
    if head.startswith(GZIP) or head.removeprefix(BOM).lstrip()[:1] in (b"{", b"["):
        return read_chrome
    if head and (fault := instead_of_content(head)):
        raise TraceError(f"{path.name} {fault}")
    if STREAM in head:
        raise TraceError(
            f"{path.name} is a raw stream (.qdstrm) that nsys could not import: the importer was missing, or the run "
            f"was killed; `labkit doctor` says how to repair the installation, then record again. {EXPECTED}"
        )
    if REPORT in head:
        return read_report
    if not head:
        raise TraceError(f"{path.name} is empty: it was cut short, or the disk was full; {EXPECTED}. Record again")
    raise TraceError(f"{path.name} begins with {shown_value(head[:16])}; {EXPECTED}")


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
        return read_sqlite(export)


def _joined(traces: Sequence[Trace]) -> Trace:
    """One trace of several. Processes of different files stay different processes."""
    starts = [trace.source.started_ns for trace in traces if trace.source.started_ns is not None]
    began = min(starts, default=None)
    parts: dict[str, list[pd.DataFrame]] = {name: [] for name in SCHEMA}
    skipped, unread, unread_work, processes = [], [], [], 0
    for trace in traces:
        started, file = trace.source.started_ns, " ".join(trace.source.files)
        if started is None or began is None:
            shift = 0
            skipped.append(f"{file}: no start time, so it is not on one clock with the others")
        else:
            shift = started - began
        skipped += [f"{file}: {line}" for line in trace.source.skipped]
        unread += [f"{file}: {line}" for line in trace.source.unread]
        unread_work += [f"{file}: {line}" for line in trace.source.unread_work]
        for name, frame in trace.frames.items():
            moved = {column: frame[column] + shift for column in ("start_ns", "end_ns") if column in frame}
            if "process" in frame:
                moved["process"] = frame["process"] + np.int32(processes)
            parts[name].append(frame.assign(**moved))
        processes += len(trace.processes)
    sources = [trace.source for trace in traces]
    source = Source(
        " and ".join(dict.fromkeys(source.profiler for source in sources)),
        " and ".join(dict.fromkeys(source.version for source in sources if source.version)),
        tuple(file for source in sources for file in source.files),
        began,
        tuple(skipped),
        tuple(unread),
        tuple(unread_work),
    )
    return Trace(source, **{name: _stacked(name, frames) for name, frames in parts.items()})


def _stacked(name: str, frames: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """The rows of all frames, by start. The categories of texts are joined."""
    columns: dict[str, object] = {}
    for column, dtype in SCHEMA[name].items():
        arrays = [frame[column].array for frame in frames]
        columns[column] = union_categoricals(arrays) if dtype == "category" else np.concatenate(arrays)  # type: ignore[arg-type]
    joined = typed(name, columns)
    if "start_ns" not in joined:
        return joined
    return joined.sort_values("start_ns", kind="stable", ignore_index=True)
