"""What labkit brings along beside its modules, in a checkout as in a wheel: the notebooks, and captures to look at."""

from __future__ import annotations

from pathlib import Path

PACKAGE = Path(__file__).parents[1]


def carried(folder: str) -> Path:
    """The folder "notebooks" or "profiles/captures": the checkout's, or where a wheel has put it in the package."""
    inside = PACKAGE / "carried" / folder
    return inside if inside.is_dir() else PACKAGE.parent / folder
