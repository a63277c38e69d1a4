"""How much of a model runs on labkit's kernels: the names of the levels, and a level in words."""

from __future__ import annotations

ROW, DERIVED, HOOKS = "row", "derived row", "hooks"


def kernels_in_words(impl: str, level: str) -> str:
    """The kernels of an engine: "cpp kernels", "cpp kernels by a derived row", "cpp kernels in hooks"."""
    return f"{impl} kernels" + {DERIVED: " by a derived row", HOOKS: " in hooks"}.get(level, "")
