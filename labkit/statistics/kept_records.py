"""Records of measured figures in a JSON file of labkit's cache."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ConfigDict, ValidationError

from labkit.system.cache_root import cache_root
from labkit.system.json_file import read_json
from labkit.system.validation import Listed
from labkit.system.whole_file import write_whole

SCHEMA = 1


class KeptRecord(Listed):
    """A record in a file of the cache."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


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


def write_kept(file: Path, name: str, records: Sequence[KeptRecord]) -> None:
    """Writes all records, whole or not at all. Errors: as `write_whole`."""
    entries = [record.model_dump(mode="json") for record in records]
    write_whole(file, json.dumps({"schema": SCHEMA, name: entries}, indent=1))
