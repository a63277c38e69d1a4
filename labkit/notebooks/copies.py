"""Copies of the notebooks to work in, so that labkit's own notebooks stay unchanged.

A copy is replaced when labkit has a new version of the notebook, unless the user has changed or run it. A file next to
the copies records a digest of each copy at the time when it was made.
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
from labkit.system.home import expanded
from labkit.system.input_file import read_file
from labkit.system.output_folder import COPIES, check_output_folder
from labkit.system.whole_file import whole_file, write_whole

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Copies:
    """Result of copying the notebooks into a folder: names of copies."""

    folder: Path
    names: tuple[str, ...]  # of all notebooks
    written: tuple[str, ...]  # new copies, and new versions of unchanged copies
    changed: tuple[str, ...]  # by the user, and left alone
    outdated: tuple[str, ...]  # changed copies of which labkit has a newer version

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
    """Copies labkit's notebooks into a folder, which may hold copies already. Copies that the user changed stay.

    Results of the copies go to `runs` in that folder, or to its parent if the parent is called `runs`
    (`labkit.system.output_folder`). UserError: the folder is not writable, or holds labkit's own notebooks.
    """
    folder, own = expanded(folder), carried("notebooks")
    if folder.resolve().is_relative_to(own.resolve()):
        raise UserError(f"got the folder {folder}, which holds labkit's own notebooks; name another one for the copies")
    check_output_folder(folder, what="notebooks", option="the folder")
    made = _read(folder / COPIES)
    digests, written, changed, outdated = dict(made), [], [], []
    sources = carried_notebooks()
    for name, source in sources.items():
        target, present = folder / f"{name}{ENDING}", _digest(source)
        current = _digest(target) if target.exists() else made.get(name)
        if current not in (present, made.get(name)):
            changed.append(name)
            if made.get(name) != present:
                outdated.append(name)
            continue
        digests[name] = present
        if current != present or not target.exists():
            with whole_file(target) as path:
                path.write_bytes(source.read_bytes())
            written.append(name)
    if digests != made:
        write_whole(
            folder / COPIES, json.dumps({"schema_version": SCHEMA_VERSION, "digests": digests}, indent=1) + "\n"
        )
    return Copies(folder, tuple(sources), tuple(written), tuple(changed), tuple(outdated))


def _digest(path: Path) -> str:
    """Digest of a notebook's cells and outputs, without JupyterLab's metadata; empty if the file is not a notebook."""
    try:
        cells = nbformat.reads(read_file(path, "a notebook").decode(), as_version=4).cells
    except (ValueError, KeyError, AttributeError, nbformat.ValidationError):
        return ""
    content = [(cell.cell_type, cell.source, cell.get("outputs", [])) for cell in cells]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def _read(path: Path) -> dict[str, str]:
    """The digests of the copies when they were made. Empty for a damaged file: then every copy counts as changed."""
    try:
        record = json.loads(read_file(path, "the record of the copies"))
        digests = record["digests"] if record["schema_version"] == SCHEMA_VERSION else {}
        return {str(name): str(digest) for name, digest in digests.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}
