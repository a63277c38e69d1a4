"""Texts and tables in Markdown."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence

from labkit.system.shown import shown

# Characters that begin markup in a text of one line. Brackets alone and an underscore within a word begin none.
MARKUP = re.compile(r"[\\|<*`~$]|\](?=[(\[:])|(?<!\w)_|_(?!\w)|&(?=#?\w+;)|^(?:#+|>|[-+](?= ))")


def as_text(text: str) -> str:
    """`text` in one line, escaped so that no part of it is Markdown or HTML markup, or ends a table cell."""
    return MARKUP.sub(r"\\\g<0>", shown(re.sub(r"[ \t\r\n]+", " ", text).strip(" ")))


def markdown_table(header: Sequence[str], lines: Iterable[Sequence[str]], right: Collection[int] = ()) -> str:
    """A Markdown table of a header and lines. Cells are Markdown: pass a stranger's text through `as_text`.

    right: numbers of the columns that are aligned to the right.
    """
    rule = ["---:" if place in right else "---" for place in range(len(header))]
    return "\n".join("| " + " | ".join(line) + " |" for line in (header, rule, *lines))
