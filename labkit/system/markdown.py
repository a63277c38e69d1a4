"""Texts and tables in Markdown."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from labkit.system.shown import shown

# What begins markup in a text of one line. Brackets alone do not, and neither does an underscore within a word.
MARKUP = re.compile(r"[\\|<*`~$]|\](?=[(\[:])|(?<!\w)_|_(?!\w)|&(?=#?\w+;)|^(?:#+|>|[-+](?= ))")


def as_text(text: str) -> str:
    """A text of anybody's in one line, in which nothing is markup of Markdown or HTML or ends a cell of a table."""
    return MARKUP.sub(r"\\\g<0>", shown(re.sub(r"[ \t\r\n]+", " ", text).strip(" ")))


def markdown_table(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A table in Markdown with these titles and lines, whose cells are Markdown: a text of anybody's is `as_text`."""
    return "\n".join("| " + " | ".join(line) + " |" for line in (header, ["---"] * len(header), *lines))
