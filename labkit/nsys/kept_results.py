"""Results of traces, kept between processes in labkit's cache: traces that were read, and their summaries.

A result is a folder with a JSON file and an Arrow file for each frame, which is mapped into memory. Its key is a digest
of all that it depends on: the contents of the trace files, the settings, labkit's code that reads and summarises, and
the versions of pandas, NumPy and Arrow. So changed files or changed code never get an old result. A result that is
damaged is made anew, and a cache that can't be written is ignored.

Storing a result removes the same result of other code, results that were unused for too long, and beyond a number of
bytes the results that were unused for the longest.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pandas as pd
import pyarrow as pa

from labkit.system.cache_root import cache_root
from labkit.system.errors import UserError
from labkit.system.owned_folder import owned_folder

T = TypeVar("T")
FOLDER = "traces"
ABOUT = "about.json"
SMALLEST_BYTES = 1_000_000  # a smaller file is read as quickly as its kept result
DAY_S = 86_400
LABKIT = Path(__file__).parents[1]
CODE = tuple(
    sorted(
        file
        for pattern in ("stages.py", "published.*", "nsys/**/*.py", "statistics/**/*.py", "system/**/*.py")
        for file in LABKIT.glob(pattern)
    )
)


@dataclass(frozen=True)
class Bounds:
    """Bounds on the kept results."""

    size_bytes: int = 8 << 30  # of all results together
    unused_days: int = 30  # of one result


BOUNDS = Bounds()


@dataclass(frozen=True)
class Packed:
    """A result as it is kept."""

    about: Mapping[str, Any]  # what JSON can hold
    frames: Mapping[str, pd.DataFrame]


@dataclass(frozen=True)
class Unpacked:
    """A kept result whose checksums are right. The columns of `batches` stay in the pages of their files."""

    about: Mapping[str, Any]
    batches: Mapping[str, pa.RecordBatch]


def kept(
    files: Sequence[Path],
    settings: str,
    make: Callable[[], T],
    *,
    pack: Callable[[T], Packed],
    unpack: Callable[[Unpacked], T],
) -> T:
    """`make()`, or its earlier result for files with the same contents and for the same settings.

    Results of files below SMALLEST_BYTES are not kept. `make` reports files that are missing or unreadable.
    """
    folder = _folder(files, settings)
    if folder is None:
        return make()
    with suppress(OSError, ValueError, LookupError, TypeError, pa.ArrowException):
        result = unpack(_loaded(folder))
        os.utime(folder)
        return result
    result = make()
    with suppress(OSError, pa.ArrowException):
        _store(folder, pack(result))
    return result


def _folder(files: Sequence[Path], settings: str) -> Path | None:
    """The folder of a result; None for small or unreadable files, and without a folder for caches."""
    root = cache_root()
    with suppress(OSError):
        if root is None or sum(path.stat().st_size for path in files) < SMALLEST_BYTES:
            return None
        key = hashlib.sha256(settings.encode())
        for path in files:
            with path.open("rb") as file:
                key.update(hashlib.file_digest(file, "sha256").digest())
        return Path(root, FOLDER, f"{key.hexdigest()[:32]}-{_code_digest()[:12]}")
    return None


@cache
def _code_digest() -> str:
    versions = " ".join(library.__version__ for library in (pd, np, pa))
    return hashlib.sha256(b"".join([versions.encode(), *(file.read_bytes() for file in CODE)])).hexdigest()


def _loaded(folder: Path) -> Unpacked:
    about = json.loads((folder / ABOUT).read_text())
    batches = {name: _batch(folder / f"{name}.arrow", crc) for name, crc in about["crc"].items()}
    return Unpacked(about["about"], batches)


def _batch(file: Path, crc: int) -> pa.RecordBatch:
    mapped = pa.memory_map(str(file))
    if zlib.crc32(mapped.read_buffer()) != crc:
        raise UserError(f"{file} is damaged")
    mapped.seek(0)
    return pa.ipc.open_file(mapped).get_batch(0)


def _store(folder: Path, result: Packed) -> None:
    """Stores a result. It is written under another name first, so that no reader finds half of it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with owned_folder(".writing-", folder.parent) as place:
        written = place / folder.name
        written.mkdir()
        crc = {}
        for name, frame in result.frames.items():
            file = written / f"{name}.arrow"
            batch = pa.RecordBatch.from_pandas(frame, preserve_index=False)
            with pa.ipc.new_file(str(file), batch.schema) as writer:
                writer.write_batch(batch)
            crc[name] = zlib.crc32(pa.memory_map(str(file)).read_buffer())
        (written / ABOUT).write_text(json.dumps({"about": result.about, "crc": crc}))
        for old in folder.parent.glob(f"{folder.name.partition('-')[0]}-*"):  # damaged, or of other code
            shutil.rmtree(old, ignore_errors=True)
        written.rename(folder)
    remove_old(folder.parent, BOUNDS, keep=folder)


def remove_old(parent: Path, bounds: Bounds, *, keep: Path) -> None:
    """Removes folders of `parent`, the longest unused first, until the rest is within `bounds`.

    `keep` stays, however large it is. Folders whose names begin with a dot stay too: somebody may be writing them.
    """
    now, size = time.time(), _size_bytes(keep)
    for when, folder in sorted(_dated(parent, keep), reverse=True):
        size += _size_bytes(folder)  # of all that were used since then, so that no older one stays in place of a newer
        if size > bounds.size_bytes or now - when > bounds.unused_days * DAY_S:
            shutil.rmtree(folder, ignore_errors=True)


def _dated(parent: Path, keep: Path) -> list[tuple[float, Path]]:
    """The folders except `keep`, each with the time of its last use."""
    dated = []
    for folder in parent.glob("[!.]*"):
        with suppress(OSError):  # another process removed it
            if folder != keep and folder.is_dir():
                dated.append((folder.stat().st_mtime, folder))
    return dated


def _size_bytes(folder: Path) -> int:
    total = 0
    for file in folder.glob("**/*"):
        with suppress(OSError):
            total += file.stat().st_size
    return total
