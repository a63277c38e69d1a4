"""JSON that others wrote: read in linear time, and refused where it is damaged or larger than any such file is."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from labkit.system.errors import UserError

MOST_BYTES = 64 << 20  # the index of the largest published checkpoints has less than a tenth of that
MOST_LEVELS = 32  # objects and lists within each other; configs, indices and manifests have four at most
BRACKETS = re.compile(r'"(?:[^"\\]++|\\.)*+"?|[\[\]{}]', re.DOTALL)  # a string is matched whole, and so skipped


def read_json(path: Path, expected: str) -> Any:
    """What the JSON file at `path` holds. `expected`: what it should be, for the error.

    Raises UserError, naming the file, for one that is no JSON, has more than MOST_BYTES or nests deeper than
    MOST_LEVELS; OSError for one that cannot be read.
    """
    with path.open("rb") as file:
        data = file.read(MOST_BYTES + 1)  # a device may have no end, and says nothing of its size
    if len(data) > MOST_BYTES:
        size = path.stat().st_size
        raise UserError(f"{path} has {size or 'more'} bytes; expected at most {MOST_BYTES} of {expected}")
    return parse_json(data, path, expected)


def parse_json(data: bytes, path: Path, expected: str) -> Any:
    """As `read_json`, of bytes that were read from `path` already."""
    try:
        text = data.decode()
        deep = _too_deep(text)
        values = None if deep else json.loads(text)
    except ValueError as error:  # no UTF-8, no JSON, or a number of thousands of digits
        raise UserError(f"{path} is not JSON ({error}); expected {expected}") from None
    if deep:
        raise UserError(f"{path} nests deeper than {MOST_LEVELS} levels; expected {expected}")
    return values


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
