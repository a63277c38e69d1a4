"""`impl=` of every op: named by the caller, never replaced in silence."""

from collections.abc import Callable
from typing import Any

from labkit.system.errors import UserError

IMPLS = ("reference", "cpp", "triton")


def choose(op: str, impl: str, **implementations: Callable[..., Any]) -> Callable[..., Any]:
    """The implementation called `impl`. Raises ValueError for an unknown name and lists the known."""
    if impl not in implementations:
        raise UserError(f"{op}: unknown impl {impl!r}; expected one of {', '.join(sorted(implementations))}")
    return implementations[impl]
