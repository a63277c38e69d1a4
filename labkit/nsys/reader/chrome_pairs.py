"""Pairs the begins and ends of a Chrome trace, which may be in any order in the file."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from decimal import Decimal
from typing import Any, NamedTuple


class Half(NamedTuple):
    """A begin or an end."""

    begins: bool
    ts: int | Decimal  # in microseconds
    element: int  # number of the event in the file
    name: str  # empty if the event has none
    category: Any
    args: Mapping[str, Any]


def pairs(halves: Iterable[Half]) -> list[tuple[Half, Half]]:
    """The begins and ends of one thread that belong together, in the order of the begins.

    An end with a name closes the innermost open begin with this name, and an end without a name the innermost of all.
    Events at the same time are taken in the order of the file.
    """
    ends: dict[int, Half] = {}  # by the element of the begin
    opened: defaultdict[str, list[Half]] = defaultdict(list)  # begins by name, and all begins under ""
    in_time = sorted(halves, key=lambda half: half.ts)
    for half in in_time:
        if half.begins:
            for name in {"", half.name}:
                opened[name].append(half)
            continue
        stack = opened[half.name]
        while stack and stack[-1].element in ends:  # closed by the other kind of end
            stack.pop()
        if stack:
            ends[stack.pop().element] = half
    return [(half, ends[half.element]) for half in in_time if half.element in ends]
