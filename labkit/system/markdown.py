"""Tables in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def markdown_table(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A table in Markdown with these titles and lines."""
    return "\n".join("| " + " | ".join(line) + " |" for line in (header, ["---"] * len(header), *lines))
