"""Places of values in arguments: names of dicts and records, and numbers of tuples."""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any

Place = tuple[str, ...]


def leaves(value: Any, path: Place = ()) -> Iterator[Place]:
    """Paths of all replaceable values: every argument, and every field of its records."""
    if path:
        yield path
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from leaves(inner, (*path, name))
    elif is_dataclass(value):
        for field in fields(value):
            yield from leaves(getattr(value, field.name), (*path, field.name))
    elif isinstance(value, tuple):
        for number, inner in enumerate(value):
            yield from leaves(inner, (*path, str(number)))


def at(value: Any, path: Place) -> Any:
    for name in path:
        value = _part(value, name)
    return value


def _part(value: Any, name: str) -> Any:
    if isinstance(value, tuple):
        return value[int(name)]
    return value[name] if isinstance(value, dict) else getattr(value, name)


def put(value: Any, path: Place, new: Any) -> Any:
    if not path:
        return new
    if isinstance(value, dict):
        return value | {path[0]: put(value[path[0]], path[1:], new)}
    part = put(_part(value, path[0]), path[1:], new)
    if isinstance(value, tuple):
        return tuple(part if number == int(path[0]) else other for number, other in enumerate(value))
    return replace(value, **{path[0]: part})
