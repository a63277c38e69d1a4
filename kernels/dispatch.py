"""Checks `impl=` and `threads=` of every op: the caller names them, and they are never replaced silently."""

import os
from collections.abc import Callable
from typing import Any

from labkit.system.errors import UserError

MOST_THREADS = max(256, os.cpu_count() or 1)  # OpenMP ends the process if it gets fewer threads than it needs


def choose(op: str, impl: str, threads: int = 1, **implementations: Callable[..., Any]) -> Callable[..., Any]:
    """The implementation called `impl`. Raises ValueError for an unknown name, and for less than one thread."""
    if impl not in implementations:
        raise UserError(f"{op}: unknown impl {impl!r}; expected one of {', '.join(sorted(implementations))}")
    if threads < 1:
        raise UserError(f"{op}: got threads = {threads}, expected 1 or more")
    return implementations[impl]
