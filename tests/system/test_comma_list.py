"""Lists with commas: items are taken once, and what is no list of counts is refused with an example."""

import pytest

from labkit.system.comma_list import listed, listed_counts
from labkit.system.errors import UserError


@pytest.mark.parametrize(
    ("text", "items"),
    [
        ("a", ("a",)),
        (" b, a,,b ", ("b", "a")),
        ("", ()),
        (" , ,", ()),
        ("a b,c", ("a b", "c")),
        (" hf-disk, ,accelerate-disk,hf-disk", ("hf-disk", "accelerate-disk")),
    ],
)
def test_items_are_taken_once_without_blanks(text: str, items: tuple[str, ...]) -> None:
    assert listed(text) == items


def test_counts_are_sorted() -> None:
    assert listed_counts("sizes", " 16,1, 4,,1", "sizes") == (1, 4, 16)


@pytest.mark.parametrize("text", ["", ",", "0", "1,0", "-1", "1.5", "x", "²", "9" * 5000])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(UserError, match=r"got sizes = .*, expected sizes, such as '1, 2'"):
        listed_counts("sizes", text, "sizes, such as '1, 2'")
