"""The reference of a package, from its docstrings: whatever `__all__` lists, in the order of the alphabet."""

from __future__ import annotations

import inspect
import re
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, get_type_hints

from docutils import nodes
from sphinx.util.docutils import SphinxDirective
from sphinx.util.inspect import stringify_signature
from sphinx.util.typing import stringify_annotation

FIELD = re.compile(r"^    (?!_)(\w+): [^#\n]+  # (.+)$", flags=re.MULTILINE)


PAGES = (Path(__file__).parent / "reference").glob("[a-z]*.md")
PACKAGES = ["labkit", *sorted(f"labkit.{page.stem}" for page in PAGES if page.stem not in ("command-line", "labkit"))]


class PublicNames(SphinxDirective):
    """`public-names` with the name of a package: what it says of itself, and an entry for each of its names."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        package = import_module(self.arguments[0])
        lines = inspect.cleandoc(package.__doc__ or "").splitlines()
        for name in sorted(public(package), key=str.lower):
            lines += ["", *entry(package, name, getattr(package, name))]
        return self.parse_text_to_nodes("\n".join(["```{eval-rst}", *lines, "```"]))


def public(package: ModuleType) -> list[str]:
    """The names that a package lists, or else what a module defines without an underscore."""
    own = [name for name, thing in vars(package).items() if getattr(thing, "__module__", "") == package.__name__]
    return list(getattr(package, "__all__", [name for name in own if not name.startswith("_")]))


def entry(package: ModuleType, name: str, thing: object) -> list[str]:
    """The directive of autodoc for one name, or where it is described already."""
    home, place = package.__name__, f"{package.__name__}::{name}"
    for other in PACKAGES[: PACKAGES.index(home)]:
        if getattr(import_module(other), name, None) is thing:
            return [f":py:obj:`{home}.{name} <{other}.{name}>` is the same as `{other}.{name}`."]
    if inspect.ismodule(thing):
        return [f".. automodule:: {thing.__name__}"]
    if inspect.isclass(thing):
        return [f".. autoexception:: {place}" if issubclass(thing, BaseException) else f".. autoclass:: {place}"]
    if callable(thing):
        return [f".. autofunction:: {place}"]
    return [f".. py:data:: {name}", f"   :module: {home}", f"   :value: {thing!r}"]


def plain_types(
    app: Any, what: str, name: str, thing: Any, options: Any, signature: str | None, returns: str | None
) -> tuple[str, str] | None:
    """Leaves out of a signature what annotations say to command lines and controls alone (`Annotated`)."""
    if "Annotated[" not in (signature or ""):
        return None
    types, own = get_type_hints(thing), inspect.signature(thing)
    parameters = [given.replace(annotation=types.get(given.name, given.empty)) for given in own.parameters.values()]
    plain = own.replace(parameters=parameters, return_annotation=own.empty)
    result = stringify_annotation(types["return"], "smart") if "return" in types else ""
    return stringify_signature(plain, unqualified_typehints=True), result


def text_from_the_first_line(app: Any, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """Keeps the words before a colon in a property's first line, which napoleon takes for a type. It reads an empty
    comment instead.
    """
    if what == "property":
        lines[:0] = ["..", ""]


def named_by_number(app: Any, what: str, name: str, thing: Any, skip: bool, options: Any) -> bool | None:
    """Leaves out the fields of a named tuple, of which Python says only their numbers; the signature has them."""
    return True if str(getattr(thing, "__doc__", "")).startswith("Alias for field number") else None


def fields_with_their_comments(app: Any, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """Adds to a class of labkit what the comments beside its fields say. Autodoc asks about imported classes, too."""
    if what == "class" and thing.__module__.startswith("labkit"):
        lines += ["", *(f"* `{field}`: {comment}" for field, comment in FIELD.findall(inspect.getsource(thing)))]
