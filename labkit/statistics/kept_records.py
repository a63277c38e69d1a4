"""Records of measured figures in a JSON file of labkit's cache."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import psutil
from pydantic import ConfigDict, Field, ValidationError

from labkit.system.cache_root import cache_root
from labkit.system.json_file import read_json
from labkit.system.processor import cpu_name
from labkit.system.processors import physical_cores
from labkit.system.validation import Listed
from labkit.system.whole_file import write_whole

SCHEMA = 1
MOST = 256  # records in a file; the oldest leave
SAME_MEMORY = 0.05  # the system's own part of the memory differs a little from start to start


class KeptRecord(Listed):
    """A record in a file of the cache."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Machine(KeptRecord):
    """A machine, as far as the place of weights in its memory depends on it."""

    cpu: str
    cores: int
    memory_gb: float = Field(gt=0)

    @classmethod
    def here(cls) -> Machine:
        memory_gb = round(psutil.virtual_memory().total / 1e9, 1)
        return cls(cpu=cpu_name(), cores=physical_cores(), memory_gb=memory_gb)

    def is_same(self, other: Machine) -> bool:
        alike = abs(math.log(self.memory_gb / other.memory_gb)) < SAME_MEMORY
        return alike and (self.cpu, self.cores) == (other.cpu, other.cores)


Record = TypeVar("Record", bound=KeptRecord)


def kept_file(name: str, folder: Path | None) -> Path | None:
    """The file of this name in `folder` (None: labkit's cache). None: the user has no cache."""
    folder = folder or cache_root()
    return None if folder is None else folder / name


def read_kept(file: Path | None, name: str, kind: type[Record]) -> list[Record]:
    """The complete records under `name`; none of a file that is missing or damaged."""
    content: Any = None
    with suppress(OSError, ValueError):
        content = None if file is None else read_json(file, f"measured {name}")
    entries = content.get(name) if isinstance(content, dict) and content.get("schema") == SCHEMA else None
    records = []
    for entry in entries if isinstance(entries, list) else []:
        with suppress(ValidationError):
            records.append(kind.model_validate(entry))
    return records


def write_kept(file: Path, name: str, record: Record, *, replaces: Callable[[Record], bool]) -> None:
    """Adds a record to the file, whole or not at all. Errors: as `write_whole`.

    replaces: whether the new record takes the place of this one.
    """
    others = [kept for kept in read_kept(file, name, type(record)) if not replaces(kept)]
    entries = [kept.model_dump(mode="json") for kept in [*others, record][-MOST:]]
    write_whole(file, json.dumps({"schema": SCHEMA, name: entries}, indent=1))
