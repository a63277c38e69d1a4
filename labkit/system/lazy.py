"""Packages that load their parts on first use."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy_parts(package: str, homes: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """The `__getattr__` and the `__dir__` of a package. `homes` maps each name to the module that has it, or to the
    module of that name. `dir` lists all names before any is loaded, so that completion shows them.
    """

    def part(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = import_module(homes[name])
        return module if homes[name] == f"{package}.{name}" else getattr(module, name)

    def names() -> list[str]:
        return sorted({*homes, *(name for name in vars(import_module(package)) if name.startswith("__"))})

    return part, names
