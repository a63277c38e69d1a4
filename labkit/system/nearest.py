"""Suggestions for a mistyped name."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

MOST, LIKENESS = 3, 0.5


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The names of `known` that are most like `name`, the nearest first, as the end of an error message:
    " (did you mean 'gpt2' or 'gpt2-xl'?)". Empty if no name is like it.
    """
    of_key = {known_name.casefold(): str(known_name) for known_name in known}
    near = [repr(of_key[key]) for key in get_close_matches(name.casefold(), of_key, MOST, LIKENESS)]
    if not near:
        return ""
    *others, last = near
    return f" (did you mean {', '.join(others)} or {last}?)" if others else f" (did you mean {last}?)"
