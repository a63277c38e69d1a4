"""Cache of summaries of traces.

They are kept next to the traces of `labkit.nsys.reader.cache`, by a digest of the files' contents, labkit's code for
traces and the selection. A summary that is damaged, or that can't be kept, is made anew.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa

from labkit.nsys.reader.cache import SMALLEST_BYTES
from labkit.nsys.reader.reading import read
from labkit.nsys.tables.selection import EVERYTHING, Selection
from labkit.nsys.tables.summary import TraceSummary, summarise
from labkit.nsys.trace import Source
from labkit.system.cache_root import cache_root
from labkit.system.input_file import open_file
from labkit.system.kept_folders import Bounds, remove_old, used
from labkit.system.owned_folder import owned_folder

ABOUT = "about.json"
LABKIT = Path(__file__).parents[2]
CODE = (  # the files that a summary depends on
    *sorted(LABKIT.glob("nsys/**/*.py")),
    *sorted(LABKIT.glob("statistics/**/*.py")),
    *sorted(LABKIT.glob("system/**/*.py")),
    LABKIT / "stages.py",
    *sorted(LABKIT.glob("published.*")),
)
BOUNDS = Bounds()


def summary_of(files: Sequence[Path], selection: Selection = EVERYTHING) -> TraceSummary:
    """`summarise` of the traces in these files, or its earlier result for the same contents."""
    folder = _folder(files, selection)
    if folder is not None:
        with suppress(OSError, ValueError, LookupError, TypeError, pa.ArrowException):
            summary = _load(folder, files)
            used(folder)
            return summary
    summary = summarise(read(files), selection)
    if folder is not None:
        with suppress(OSError, pa.ArrowException):
            _store(folder, summary)
    return summary


def _folder(files: Sequence[Path], selection: Selection) -> Path | None:
    """The folder of this summary; None for small or missing files, and without a folder for caches."""
    root = cache_root()
    with suppress(OSError):
        if root is None or sum(path.stat().st_size for path in files) < SMALLEST_BYTES:
            return None
        key = hashlib.sha256(f"{_code_digest()} {selection} {pd.__version__}".encode())
        for path in files:
            with open_file(path, "a trace") as file:
                key.update(path.name.encode() + hashlib.file_digest(file, "sha256").digest())
        return Path(root, "summaries", key.hexdigest()[:32])
    return None


@cache
def _code_digest() -> str:
    return hashlib.sha256(b"".join(path.read_bytes() for path in CODE)).hexdigest()


def _load(folder: Path, files: Sequence[Path]) -> TraceSummary:
    about = json.loads((folder / ABOUT).read_text())
    source = Source.kept(about["source"], tuple(path.name for path in files))
    frames = {name: pd.read_parquet(folder / f"{name}.parquet") for name in about["frames"]}
    return TraceSummary(source=source, **frames, remarks=tuple(about["remarks"]), ranks_known=about["ranks_known"])


def _store(folder: Path, summary: TraceSummary) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    with owned_folder(".writing-", folder.parent) as place:
        written = place / folder.name
        written.mkdir()
        for name, frame in summary.frames.items():
            frame.to_parquet(written / f"{name}.parquet", index=False)
        about: dict[str, Any] = {"source": asdict(summary.source), "frames": list(summary.frames)}
        about |= {"remarks": summary.remarks, "ranks_known": summary.ranks_known}
        (written / ABOUT).write_text(json.dumps(about))
        shutil.rmtree(folder, ignore_errors=True)
        written.rename(folder)
    remove_old(folder.parent, BOUNDS, keep=folder)
