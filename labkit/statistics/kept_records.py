"""Records of measured figures in a JSON file of labkit's cache."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from labkit.system.json_file import read_json
from labkit.system.whole_file import write_whole

SCHEMA = 1
Record = TypeVar("Record", bound=BaseModel)


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


def write_kept(file: Path, name: str, records: Sequence[BaseModel]) -> None:
    """Writes all records, whole or not at all. Errors: as `write_whole`."""
    entries = [record.model_dump(mode="json") for record in records]
    write_whole(file, json.dumps({"schema": SCHEMA, name: entries}, indent=1))
