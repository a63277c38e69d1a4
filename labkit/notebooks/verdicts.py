"""Verdicts on numeric answers: right within 1 %, or the mistake that a wrong answer suggests.

An answer may be any value that a user types into a cell.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping
from numbers import Real

from labkit.studies.frames import number
from labkit.system.errors import UserTypeError

TOLERANCE = 0.01


def number_or_remark(answer: object) -> float | str:
    """The answer as a number, or a remark if it is missing or not a number."""
    if answer is None:
        return "not answered yet"
    if not isinstance(answer, Real) or isinstance(answer, bool):
        return f"not yet: got {shown(answer)}, expected a number, such as 12.5"
    try:
        value = float(answer)
    except OverflowError:
        value = math.inf
    return value if math.isfinite(value) else f"not yet: got {shown(answer)}, expected a finite number"


def shown(value: object) -> str:
    """A value of any type, shortened to one line."""
    return f"`{' '.join(reprlib.repr(value).split())}` ({type(value).__name__})"


def checked(reply: object, right: float, mistakes: Mapping[float, str], *, tolerance: float = TOLERANCE) -> str:
    """The verdict on an answer.

    - mistakes: remarks by wrong value, for an answer that is close to it.
    - tolerance: fraction by which a right answer may differ, for instance because it starts from rounded figures.
    """
    answer = number_or_remark(reply)
    if isinstance(answer, str):
        return answer
    if close(answer, right, tolerance):
        return f"**right**: {number(answer)}"
    nearest = min(mistakes, key=lambda value: abs(answer - value))
    if close(answer, nearest):
        return f"not yet: {mistakes[nearest]}"
    for factor in (2, 4):
        if close(answer, right * factor) or close(answer, right / factor):
            return f"not yet: off by a factor of {factor}; bytes of a number, or something counted twice?"
    for factor in (1_000, 1_000_000, 1_000_000_000):
        if close(answer, right * factor) or close(answer, right / factor):
            return f"not yet: off by a factor of {factor:,}; which unit is asked for?"
    return f"not yet: {number(answer)} is too {'high' if answer > right else 'low'}"


def close(answer: float, value: float, tolerance: float = TOLERANCE) -> bool:
    """Whether an answer counts as this value."""
    return abs(answer - value) <= tolerance * abs(value)


def require_text(setting: str, value: object) -> None:
    """Raises UserTypeError where the value of a setting is no text."""
    if not isinstance(value, str):
        raise UserTypeError(f"{setting}: got {shown(value)}, expected its name as text")
