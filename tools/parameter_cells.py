"""Writes the `parameters` cell of every notebook, from the settings in the signature of its study."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from labkit import widgets
from labkit.notebooks.parameters import parameters_cell

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"


def main() -> None:
    """Writes the cells of the notebooks that have a study."""
    for path in sorted(NOTEBOOKS.rglob("*.ipynb")):
        notebook = json.loads(path.read_text())
        for cell in notebook["cells"]:
            if "parameters" in cell["metadata"].get("tags", []) and (bench := bench_of(notebook)):
                cell["source"] = parameters_cell(bench.declared).splitlines(keepends=True)
        path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")


def bench_of(notebook: dict[str, Any]) -> Any:
    """The bench that a notebook imports; None without one."""
    imported = (getattr(widgets, name) for name in _imported(notebook))
    return next((bench for bench in imported if hasattr(bench, "study")), None)


def _imported(notebook: dict[str, Any]) -> Iterator[str]:
    for cell in notebook["cells"]:
        for line in re.findall(r"^from labkit\.widgets import (.*)$", "".join(cell["source"]), flags=re.MULTILINE):
            yield from line.split(", ")


if __name__ == "__main__":
    main()
