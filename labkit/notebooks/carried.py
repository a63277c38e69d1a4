"""The notebooks that labkit includes, by name."""

from __future__ import annotations

from pathlib import Path

from labkit.notebooks.failure import NotebookError
from labkit.system.carried import carried
from labkit.system.home import expanded
from labkit.system.json_file import read_json
from labkit.system.nearest import did_you_mean

ENDING = ".ipynb"


def carried_notebooks() -> dict[str, Path]:
    """The paths of the notebooks by name, in order, without the exercises of the workshop."""
    root = carried("notebooks")
    paths = {path.relative_to(root): path for path in sorted(root.rglob(f"*{ENDING}"))}
    return {
        inside.with_suffix("").as_posix(): path
        for inside, path in paths.items()
        if not any(part.startswith(".") for part in inside.parts)  # JupyterLab's own files
        and inside.parts[0] != "workshop"
    }


def title(path: Path) -> str:
    """The heading at the beginning of a notebook; empty if there is no heading."""
    cells = read_json(path, "a Jupyter notebook").get("cells", [])
    first = "".join(cells[0]["source"]) if cells and cells[0]["cell_type"] == "markdown" else ""
    return first.partition("\n")[0].removeprefix("# ").strip() if first.startswith("# ") else ""


def find_notebook(name: str | Path) -> Path:
    """The file of this name, with or without its ending, else labkit's own notebook of this name.

    NotebookError if neither exists.
    """
    path = expanded(name)
    for candidate in (path, path.with_name(path.name + ENDING) if path.name else path):
        if candidate.is_file() or candidate.is_fifo():  # a pipe is refused where it is opened
            return candidate
    known, stem = carried_notebooks(), str(name).removesuffix(ENDING)
    matches = [known[stem]] if stem in known else [path for path in known.values() if path.stem == stem]
    if len(matches) == 1:
        return matches[0]
    names = f", or one of labkit's notebooks: {', '.join(known)}" if known else ""
    raise NotebookError(f"no notebook at {name}{did_you_mean(path.stem, known)}; expected a file{names}")
