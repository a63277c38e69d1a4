"""Cache of traces that were read before, as Arrow files that are mapped into memory.

The key of a trace is the digest of its file's contents, of the code that reads it and of the columns of a Trace. So a
changed file, or a changed reader, never gets an old trace. Removed are the entries of other readers for the same file,
entries not read for BOUNDS' days, and beyond BOUNDS' bytes the entries read longest ago. A cache that is damaged, or
that can't be written, is ignored.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from functools import cache
from pathlib import Path

import pandas as pd
import pyarrow as pa

from labkit.nsys.trace import SCHEMA, Source, Trace, typed
from labkit.system.cache_root import cache_root
from labkit.system.errors import UserError
from labkit.system.kept_folders import Bounds, remove_old, used
from labkit.system.owned_folder import owned_folder

SMALLEST_BYTES = 1_000_000  # a smaller file is read as quickly as its cache
BOUNDS = Bounds()
ABOUT = "source.json"
LABKIT = Path(__file__).parents[2]
CODE = (  # the files that a trace depends on
    LABKIT / "stages.py",
    *sorted(LABKIT.glob("system/*.py")),
    LABKIT / "nsys" / "process.py",
    LABKIT / "nsys" / "run_load.py",
    LABKIT / "nsys" / "tool.py",
    LABKIT / "nsys" / "trace.py",
    *sorted(Path(__file__).parent.glob("*.py")),
)


def cached(path: Path, read: Callable[[Path], Trace]) -> Trace:
    """read(path), or its result for a file with the same contents that was read before."""
    if path.stat().st_size < SMALLEST_BYTES:
        return read(path)
    folder = _folder(path)
    if folder is None:
        return read(path)
    with suppress(OSError, ValueError, LookupError, TypeError, pa.ArrowException):
        trace = _load(folder, path.name)
        used(folder)
        return trace
    trace = read(path)
    with suppress(OSError, pa.ArrowException):
        _store(folder, trace)
    return trace


def _folder(path: Path) -> Path | None:
    """The folder of this file's trace in the cache; None without a folder for caches."""
    root = cache_root()
    if root is None:
        return None
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return Path(root, "traces", f"{digest[:32]}-{_reader_digest()[:12]}")


@cache
def _reader_digest() -> str:
    return hashlib.sha256(b"".join(file.read_bytes() for file in CODE)).hexdigest()


def _load(folder: Path, name: str) -> Trace:
    about = json.loads((folder / ABOUT).read_text())
    frames = {frame: _frame(frame, folder / f"{frame}.arrow", about["crc"][frame]) for frame in SCHEMA}
    return Trace(Source.kept(about["source"], (name,)), **frames)


def _frame(frame: str, file: Path, crc: int) -> pd.DataFrame:
    """The frame of a file. Its columns are not copied, but stay in the file's pages."""
    mapped = pa.memory_map(str(file))
    if zlib.crc32(mapped.read_buffer()) != crc:
        raise UserError(f"{file} is damaged")
    mapped.seek(0)
    batch = pa.ipc.open_file(mapped).get_batch(0)
    columns = {}
    for name, dtype in SCHEMA[frame].items():
        column = batch.column(name)
        if dtype == "category":
            texts = pd.Index(column.dictionary.to_pylist(), dtype="str")
            columns[name] = pd.Categorical.from_codes(column.indices.to_numpy(), texts)
        else:
            columns[name] = column.to_numpy(zero_copy_only=dtype != "bool")
    return typed(frame, columns)


def _store(folder: Path, trace: Trace) -> None:
    """Stores a trace. It is written under another name first, so that no reader finds half of it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with owned_folder(".writing-", folder.parent) as place:
        written = place / folder.name
        written.mkdir()
        crc = {}
        for name, frame in trace.frames.items():
            file = written / f"{name}.arrow"
            batch = pa.RecordBatch.from_pandas(frame, preserve_index=False)
            with pa.ipc.new_file(str(file), batch.schema) as writer:
                writer.write_batch(batch)
            crc[name] = zlib.crc32(pa.memory_map(str(file)).read_buffer())
        (written / ABOUT).write_text(json.dumps({"source": asdict(trace.source), "crc": crc}))
        for old in folder.parent.glob(f"{folder.name.partition('-')[0]}-*"):  # damaged, or of another reader
            shutil.rmtree(old, ignore_errors=True)
        written.rename(folder)
    remove_old(folder.parent, BOUNDS, keep=folder)
