"""Files that labkit ships with its modules, in a checkout and in a wheel: the notebooks, and example captures."""

from __future__ import annotations

from pathlib import Path

PACKAGE = Path(__file__).parents[1]


def carried(folder: str) -> Path:
    """The folder "notebooks" or "profiles/captures": in the checkout, or inside the package where a wheel puts it."""
    inside = PACKAGE / "carried" / folder
    return inside if inside.is_dir() else PACKAGE.parent / folder
