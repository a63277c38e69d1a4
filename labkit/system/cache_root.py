"""The folder of labkit's cache: compiled kernels and read traces, kept between processes and made again if lost."""

from __future__ import annotations

import os
from pathlib import Path

from labkit.system.home import expanded

CACHE = "LABKIT_CACHE"


def cache_root() -> Path | None:
    """The folder that LABKIT_CACHE names, else `labkit` in XDG_CACHE_HOME or ~/.cache; None for a user without a home.

    An empty variable counts as not set. The folder may not exist yet, and may not be writable.
    """
    if own := os.environ.get(CACHE):
        return expanded(own)
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return expanded(shared) / "labkit"
    try:
        return Path.home() / ".cache" / "labkit"
    except RuntimeError:
        return None
