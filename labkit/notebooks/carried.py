"""The notebooks that labkit brings along, by name."""

from __future__ import annotations

from pathlib import Path

from labkit.notebooks.failure import NotebookError
from labkit.system.carried import carried
from labkit.system.json_file import read_json
from labkit.system.nearest import did_you_mean

ENDING = ".ipynb"


def carried_notebooks() -> dict[str, Path]:
    """The path of each by its name, "01_vanilla_vs_fused", or for one in a folder "workshop/01_first", in order."""
    root = carried("notebooks")
    paths = {path.relative_to(root): path for path in sorted(root.rglob(f"*{ENDING}"))}
    return {
        inside.with_suffix("").as_posix(): path
        for inside, path in paths.items()
        if not any(part.startswith(".") for part in inside.parts)  # what JupyterLab keeps for itself
    }


def title(path: Path) -> str:
    """The heading that a notebook begins with; empty where it has none."""
    cells = read_json(path, "a Jupyter notebook").get("cells", [])
    first = "".join(cells[0]["source"]) if cells and cells[0]["cell_type"] == "markdown" else ""
    return first.partition("\n")[0].removeprefix("# ").strip() if first.startswith("# ") else ""


def find_notebook(name: str | Path) -> Path:
    """The file of this name, with or without its ending, else the notebook of this name that labkit brings along.

    NotebookError where there is neither.
    """
    path = Path(name)
    for candidate in (path, path.with_name(path.name + ENDING) if path.name else path):
        if candidate.is_file():
            return candidate
    known, asked = carried_notebooks(), str(name).removesuffix(ENDING)
    found = [known[asked]] if asked in known else [each for each in known.values() if each.stem == asked]
    if len(found) == 1:
        return found[0]
    brought = f", or one that labkit brings along: {', '.join(known)}" if known else ""
    raise NotebookError(f"no notebook at {name}{did_you_mean(path.stem, known)}; expected a file{brought}")
