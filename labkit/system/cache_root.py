"""The folder for what labkit keeps from one process to the next and can make again: compiled kernels, read traces."""

from __future__ import annotations

import os
from pathlib import Path

CACHE = "LABKIT_CACHE"


def cache_root() -> Path | None:
    """The folder that LABKIT_CACHE names, else `labkit` in XDG_CACHE_HOME or ~/.cache; None for a user without a home.

    An empty variable counts as none. The folder need not be there, and perhaps it can't be written.
    """
    if wanted := os.environ.get(CACHE):
        return Path(wanted)
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared, "labkit")
    try:
        return Path.home() / ".cache" / "labkit"
    except RuntimeError:
        return None
