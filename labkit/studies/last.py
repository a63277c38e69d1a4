"""Results that are read back: a study from its file, and the last result of each bench, which a notebook can show."""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import TypeAdapter, ValidationError

from labkit.harness.frozen_record import SCHEMA_VERSION, ResultRecord
from labkit.system.errors import UserError
from labkit.system.home import expanded
from labkit.system.input_file import read_file
from labkit.system.output_folder import reason
from labkit.system.validation import first_problem
from labkit.system.whole_file import write_whole

Result = TypeVar("Result")
Record = TypeVar("Record", bound=ResultRecord)
FOLDER = "last"


@dataclass(frozen=True)
class Last(Generic[Result]):
    """A result that is kept."""

    settings: dict[str, Any]  # of the measurement
    measured: datetime
    result: Result


def now() -> datetime:
    return datetime.now(UTC)


def keep_last(last: Last[Result], kind: type[Result], name: str, runs: str | os.PathLike[str]) -> None:
    """Writes the result to the folder `runs`, in place of the previous one. Warns if the folder is not writable."""
    file = _file(name, runs)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, _adapter(kind).dump_json(last).decode())
    except OSError as error:
        warnings.warn(f"the last result could not be kept as {file}: {reason(error)}", stacklevel=2)


def read_last(kind: type[Result], name: str, runs: str | os.PathLike[str]) -> Last[Result] | None:
    """The result from `keep_last`; None if nothing was kept, or if another version of labkit wrote it."""
    try:
        last: Last[Result] = _adapter(kind).validate_json(read_file(_file(name, runs), "a result"))
    except (OSError, UserError, ValidationError):
        return None
    return last


def read_study(kind: type[Record], path: str | os.PathLike[str]) -> Record:
    """The study in a file. UserError if the file holds no such record."""
    try:
        return kind.model_validate_json(read_file(expanded(path), "a study"))
    except ValidationError as error:
        name = kind.model_fields["kind"].default.replace("_", " ")
        raise UserError(
            f"{path} is no {name} of schema version {SCHEMA_VERSION}: {first_problem(error, 'the file')}; "
            "run the notebook again"
        ) from None


def _file(name: str, runs: str | os.PathLike[str]) -> Path:
    return expanded(runs) / FOLDER / f"{name}.json"


def _adapter(kind: type[Result]) -> TypeAdapter[Last[Result]]:
    return TypeAdapter(Last[kind])  # type: ignore[valid-type]
