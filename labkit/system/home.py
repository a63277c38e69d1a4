"""Paths that begin with `~`."""

from __future__ import annotations

import os
from pathlib import Path


def expanded(path: str | os.PathLike[str]) -> Path:
    """The path with the home folder instead of `~` or `~name`; unchanged if there is no user of that name."""
    return Path(os.path.expanduser(path))
