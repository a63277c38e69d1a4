"""Files that a checkpoint lists. All must lie in the checkpoint's own folder."""

from __future__ import annotations

from pathlib import Path, PurePath
from typing import Any

from labkit.system.errors import UserError
from labkit.system.json_file import read_json
from labkit.system.shown import shown_value

MOST_OF_PART, MOST_OF_PATH = 255, 1024  # bytes of a name


def stays_inside(name: str) -> bool:
    """Whether a path, as written, stays in the folder that it is relative to."""
    path = PurePath(name)
    return not path.is_absolute() and ".." not in path.parts


def listed_path(folder: Path, name: Any, listing: Path) -> Path:
    """The file `name` of a folder; the file `listing` names it.

    Only the name as written is checked. Links are followed, because the files of a snapshot in the hub's cache are
    links to another folder of that cache. Raises UserError for a name that is no text, is absolute, or has `..` in it.
    """
    if not _is_name(name):
        raise UserError(f"{listing} lists {shown_value(name)} as a file; expected the name of a file in {folder}")
    if not stays_inside(name):
        raise UserError(
            f"{listing} lists {name!r}, which leaves {folder}; a checkpoint may only name files of its own folder: "
            "copy the file there and correct the name"
        )
    return folder / name


def _is_name(name: Any) -> bool:
    """Whether a file can have this name: systems reject longer names and names with control characters."""
    if not isinstance(name, str) or not name or not name.isprintable():
        return False
    return len(name.encode()) <= MOST_OF_PATH and all(
        len(part.encode()) <= MOST_OF_PART for part in PurePath(name).parts
    )


def index_files(index: Path) -> list[Path]:
    """The files that the index of a divided checkpoint names. Raises UserError for a missing or damaged index."""
    if not index.is_file():
        raise UserError(f"{index} is missing; copy it there, or check the list of files and base_dir")
    values = read_json(index, "an object whose weight_map gives the file of each tensor")
    weight_map = values.get("weight_map") if isinstance(values, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError(
            f"{index} has no weight_map; expected an object whose weight_map gives the file of each tensor: "
            "download it again"
        )
    return sorted({listed_path(index.parent, name, index) for name in weight_map.values()})
