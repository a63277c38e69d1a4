"""Lists in a text, such as "fused, hf-eager" and "1, 2, 4", in options and settings."""

from __future__ import annotations

from labkit.system.errors import UserError

MOST_DIGITS = 9


def listed(text: str) -> tuple[str, ...]:
    """The items between the commas, each once, without blanks around them. Empty items are left out."""
    return tuple(dict.fromkeys(item for part in text.split(",") if (item := part.strip())))


def listed_counts(name: str, text: str, expected: str) -> tuple[int, ...]:
    """The whole numbers of a list, each once, in increasing order.

    UserError for an empty list, 0 and other text. `name`: the setting. `expected`: what it takes, with an example.
    """
    items = listed(text)
    if not items or not all(item.isdecimal() and len(item) <= MOST_DIGITS and int(item) for item in items):
        raise UserError(f"got {name} = {text!r}, expected {expected}")
    return tuple(sorted({int(item) for item in items}))
