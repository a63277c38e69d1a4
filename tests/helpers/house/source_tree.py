"""Parsed sources of the checkout: the imports of each module, and the lengths of files and functions."""

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import count
from pathlib import Path

ROOT = Path(__file__).parents[3]
PACKAGES = {"labkit": ROOT / "labkit", "labkit.kernels": ROOT / "kernels"}  # by their installed names


@dataclass(frozen=True)
class Import:
    """One imported name."""

    module: str  # the module that the name is or comes from
    for_types: bool  # under `if TYPE_CHECKING`: never imported when the program runs
    when_called: bool  # inside a function


def module_name(path: Path) -> str:
    package, folder = next((name, folder) for name, folder in PACKAGES.items() if path.is_relative_to(folder))
    parts = path.relative_to(folder).with_suffix("").parts
    return ".".join((package, *parts)).removesuffix(".__init__")


@cache
def modules() -> Mapping[str, Path]:
    """Every module of labkit by its full name."""
    return {module_name(path): path for folder in PACKAGES.values() for path in sorted(folder.rglob("*.py"))}


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def imports(module: str) -> tuple[Import, ...]:
    """Every import in a module of labkit, at any place."""
    path = modules()[module]
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    return tuple(_imports(tree(path), package, for_types=False, when_called=False))


def _imports(node: ast.AST, package: str, *, for_types: bool, when_called: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        types = for_types or (isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test))
        called = when_called or isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        if isinstance(child, ast.Import):
            for alias in child.names:
                yield Import(alias.name, types, called)
        elif isinstance(child, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - child.level + 1] if child.level else []
            source = ".".join([*above, *([child.module] if child.module else [])])
            for alias in child.names:
                inner = f"{source}.{alias.name}"
                yield Import(inner if inner in modules() else source, types, called)
        yield from _imports(child, package, for_types=types, when_called=called)


def room(module: str) -> str:
    """`engine` for `labkit.engine.hf.causal_lm`; empty for labkit itself."""
    return f"{module}.".split(".")[1]


def circles(graph: Mapping[str, Iterable[str]]) -> set[frozenset[str]]:
    """Groups of nodes that reach each other (strongly connected components of two or more, by Tarjan)."""
    numbers, lowest, path, components = {}, {}, [], set()
    following = count()

    def visit(node: str) -> None:
        numbers[node] = lowest[node] = next(following)
        path.append(node)
        for neighbour in graph.get(node, ()):
            if neighbour not in numbers:
                visit(neighbour)
            if neighbour in path:
                lowest[node] = min(lowest[node], lowest[neighbour])
        if lowest[node] == numbers[node]:
            group = path[path.index(node) :]
            del path[path.index(node) :]
            if len(group) > 1:
                components.add(frozenset(group))

    for node in graph:
        if node not in numbers:
            visit(node)
    return components


def functions(path: Path) -> Iterator[tuple[str, int]]:
    """(name, lines without the docstring) of each function of a Python or JavaScript file."""
    if path.suffix == ".js":
        yield from _functions_of_javascript(path.read_text())
        return
    for node in ast.walk(tree(path)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node.name, _lines(node) - (_lines(node.body[0]) if ast.get_docstring(node) is not None else 0)


def _lines(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.stmt) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def _functions_of_javascript(text: str) -> Iterator[tuple[str, int]]:
    """Finds functions by indentation: from the line that opens one to the brace below its first letter."""
    opening = r"^( *)(?:export |default |async |static |get |set |function )*(\w+)\([^\n]*\) \{$"
    for match in re.finditer(rf"{opening}(.*?)^\1\}}", text, flags=re.MULTILINE | re.DOTALL):
        yield match[2], match[0].count("\n") + 1
