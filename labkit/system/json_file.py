"""JSON files of strangers: read in linear time, and refused if they are damaged or implausibly large."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from labkit.system.errors import UserError
from labkit.system.first_bytes import instead_of_content
from labkit.system.home import expanded
from labkit.system.input_file import decoded, open_file

MOST_BYTES = 64 << 20  # ten times the index of the largest published checkpoints
MOST_LEVELS = 32  # of nested objects and lists; configs, indices and manifests have four at most
BRACKETS = re.compile(r'"(?:[^"\\]++|\\.)*+"?|[\[\]{}]', re.DOTALL)  # matches a string as a whole, to skip it


def read_json(path: Path, expected: str) -> Any:
    """The content of the JSON file at `path`. `expected`: what the file should be, for the error message.

    UserError, which names the file: it is a pipe, or not JSON, has more than MOST_BYTES, or nests deeper than
    MOST_LEVELS.
    OSError: it cannot be read.
    """
    path = expanded(path)
    with open_file(path, expected) as file:
        data = file.read(MOST_BYTES + 1)  # a device may have no end, and reports no size
    if len(data) > MOST_BYTES:
        size = path.stat().st_size
        raise UserError(f"{path} has {size or 'more'} bytes; expected at most {MOST_BYTES} of {expected}")
    return parse_json(data, path, expected)


def parse_json(data: bytes, path: Path, expected: str) -> Any:
    """Like `read_json`, for bytes that were already read from `path`."""
    if fault := instead_of_content(data.strip()):
        raise UserError(f"{path} {fault}; expected {expected}")
    text = decoded(data, path, expected)
    if _too_deep(text):
        raise UserError(f"{path} nests deeper than {MOST_LEVELS} levels; expected {expected}")
    try:
        return json.loads(text)
    except ValueError as error:  # not JSON, or a number of thousands of digits
        raise UserError(f"{path} is not JSON ({error}); expected {expected}") from None


def _too_deep(text: str) -> bool:
    level = 0
    for match in BRACKETS.finditer(text):
        mark = match[0][0]
        if mark in "[{":
            level += 1
            if level > MOST_LEVELS:
                return True
        elif mark in "]}":
            level -= 1
    return False
