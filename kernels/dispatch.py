"""Chooses the implementation that the caller names. It is never replaced silently."""

import os
from collections.abc import Callable
from typing import Any

from labkit.system.errors import UserError

MOST_THREADS = max(256, os.cpu_count() or 1)  # OpenMP ends the process if it gets fewer threads than it needs


def choose(op: str, impl: str, **implementations: Callable[..., Any]) -> Callable[..., Any]:
    """The implementation called `impl`. Raises ValueError for an unknown name."""
    if impl not in implementations:
        raise UserError(f"{op}: unknown impl {impl!r}; expected one of {', '.join(sorted(implementations))}")
    return implementations[impl]
