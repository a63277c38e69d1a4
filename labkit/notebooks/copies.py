"""Copies of the notebooks to work in, so that what a person types and measures never gets into labkit's own.

A copy is made again when labkit has another version of its notebook, but only as long as nobody has changed or run it:
a file beside the copies says what was in each when it was made.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import nbformat

from labkit.notebooks.carried import ENDING, carried_notebooks
from labkit.system.carried import carried
from labkit.system.errors import UserError
from labkit.system.output_folder import COPIES, check_output_folder
from labkit.system.whole_file import whole_file, write_whole

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Copies:
    """What became of the copies in a folder, by name. written: new ones, and new versions of those that nobody had
    changed. changed: by the user, and left alone. outdated: of these, the ones whose notebook labkit has another
    version of by now.
    """

    folder: Path
    names: tuple[str, ...]
    written: tuple[str, ...]
    changed: tuple[str, ...]
    outdated: tuple[str, ...]

    def __str__(self) -> str:
        parts = [f"{len(self.names)} notebooks in {self.folder}"]
        if self.written:
            parts.append(f"{len(self.written)} copied")
        if self.changed:
            parts.append(f"{len(self.changed)} that you changed left alone")
        line = ", ".join(parts)
        if self.outdated:
            line += f"; labkit has a newer {', '.join(self.outdated)}: delete or rename yours to get it"
        return line


def copy_notebooks(folder: str | Path) -> Copies:
    """Copy labkit's notebooks into a folder, which may hold copies already; nothing that a person changed is replaced.

    What the copies write when they run goes to `runs` in that folder, or to the folder that it is in if that is called
    `runs` (`labkit.system.output_folder`). UserError for a folder that cannot be written to, or is labkit's own.
    """
    folder, own = Path(folder), carried("notebooks")
    if folder.resolve().is_relative_to(own.resolve()):
        raise UserError(f"got the folder {folder}, which holds labkit's own notebooks; name another one for the copies")
    check_output_folder(folder, what="notebooks", option="the folder")
    made = _read(folder / COPIES)
    digests, written, changed, outdated = dict(made), [], [], []
    sources = carried_notebooks()
    for name, source in sources.items():
        target, present = folder / f"{name}{ENDING}", _digest(source)
        found = _digest(target) if target.exists() else made.get(name)
        if found not in (present, made.get(name)):
            changed.append(name)
            if made.get(name) != present:
                outdated.append(name)
            continue
        digests[name] = present
        if found != present or not target.exists():
            with whole_file(target) as path:
                path.write_bytes(source.read_bytes())
            written.append(name)
    if digests != made:
        write_whole(
            folder / COPIES, json.dumps({"schema_version": SCHEMA_VERSION, "digests": digests}, indent=1) + "\n"
        )
    return Copies(folder, tuple(sources), tuple(written), tuple(changed), tuple(outdated))


def _digest(path: Path) -> str:
    """Of all that a person writes into a notebook or gets from it, without what JupyterLab notes down; empty for a
    file that is no notebook.
    """
    try:
        cells = nbformat.reads(path.read_text(encoding="utf-8"), as_version=4).cells
    except (ValueError, KeyError, AttributeError, nbformat.ValidationError):
        return ""
    content = [(cell.cell_type, cell.source, cell.get("outputs", [])) for cell in cells]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def _read(path: Path) -> dict[str, str]:
    """The digests of the copies when they were made; of a damaged file none, so that every copy counts as changed."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        digests = found["digests"] if found["schema_version"] == SCHEMA_VERSION else {}
        return {str(name): str(digest) for name, digest in digests.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}
