"""Paths that begin with `~`, as people type them."""

from __future__ import annotations

import os
from pathlib import Path


def expanded(path: str | os.PathLike[str]) -> Path:
    """The path with the home folder in the place of `~` or `~name`; as it is where nobody has that name."""
    return Path(os.path.expanduser(path))
