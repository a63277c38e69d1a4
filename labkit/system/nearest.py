"""Suggestions for a mistyped name."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

MOST, LIKENESS = 3, 0.5


def did_you_mean(name: str, known: Iterable[str], *, likeness: float = LIKENESS) -> str:
    """The names of `known` that are most like `name`, the nearest first, as the end of an error message:
    " (did you mean 'gpt2' or 'gpt2-xl'?)". Empty if no name is like it.

    likeness: from 0 to 1; more for a list of many short names, some of which are a little like any word.
    """
    of_key = {known_name.casefold(): str(known_name) for known_name in known}
    near = [repr(of_key[key]) for key in get_close_matches(name.casefold(), of_key, MOST, likeness)]
    if not near:
        return ""
    *others, last = near
    return f" (did you mean {', '.join(others)} or {last}?)" if others else f" (did you mean {last}?)"
