"""Packages that load their parts on first use."""

from __future__ import annotations

import ast
from collections.abc import Callable, Collection
from importlib import import_module
from pathlib import Path
from typing import Any


def lazy_parts(
    package: str, modules: Collection[str] = ()
) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """The `__all__`, `__getattr__` and `__dir__` of a package that imports its parts only `if TYPE_CHECKING`.

    The names and their modules are read from these imports, so that each is written once. `dir` lists all names before
    any part is loaded, so that completion shows them. modules: of the package; further names, which are not in
    `__all__`.
    """
    homes = _type_checking_imports(package)
    public = sorted(homes)
    homes |= {name: f"{package}.{name}" for name in modules}

    def part(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = import_module(homes[name])
        return module if name in modules else getattr(module, name)

    def names() -> list[str]:
        return sorted({*homes, *(name for name in vars(import_module(package)) if name.startswith("__"))})

    return public, part, names


def _type_checking_imports(package: str) -> dict[str, str]:
    """The names of labkit that the package's source imports in its `if` block, each with its module."""
    source = Path(str(import_module(package).__file__)).read_text(encoding="utf-8")
    imports = [node for block in ast.parse(source).body if isinstance(block, ast.If) for node in block.body]
    root = package.partition(".")[0]
    return {
        name.name: module
        for node in imports
        if isinstance(node, ast.ImportFrom) and (module := str(node.module)).partition(".")[0] == root
        for name in node.names
    }
