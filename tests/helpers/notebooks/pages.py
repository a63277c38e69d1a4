"""Notebooks that are run for their pages, the figures on a page, and what its browser would fetch from outside."""

import base64
import gzip
import json
import os
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from labkit.notebooks import RunReport, run_notebook

MOST_BYTES = 2_000_000  # in a page, with plotly.js
LOADING = {"src", "href", "srcset", "data", "action", "poster", "background", "formaction"}


def run_in(folder: Path, notebook: Path, parameters: dict[str, Any]) -> RunReport:
    """Runs `notebook` with `folder` as the current one; results are in its folder `out`."""
    previous = Path.cwd()
    os.chdir(folder)
    try:
        return run_notebook(notebook, parameters, folder / "out")
    finally:
        os.chdir(previous)


class Page(HTMLParser):
    """Elements of an HTML page: `outside` references in attributes and styles, `scripts` by their text, and `text`.

    Data packed into it: its `figures`, and `libraries`, the scripts that draw them.
    """

    def __init__(self, html: str) -> None:
        super().__init__()
        self.outside: list[str] = []
        self.scripts: list[str] = []
        self.packed: list[str] = []
        self.policy, self.text = "", ""
        self._inside: tuple[str, str | None] | None = None
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self._inside = (tag, values.get("type")) if tag in ("script", "style") else None
        if values.get("http-equiv") == "Content-Security-Policy":
            self.policy = values["content"] or ""
        for name, value in attrs:
            if name in LOADING and value and not value.startswith(("#", "data:")):
                self.outside.append(f"{tag} {name}={value}")

    def handle_endtag(self, tag: str) -> None:
        self._inside = None

    def handle_data(self, data: str) -> None:
        if self._inside is None:
            self.text += data
            return
        tag, kind = self._inside
        if tag == "style" and ("@import" in data or "url(" in data):
            self.outside.append("style")
        elif tag == "script" and kind == "text/plain":
            self.packed.append(data)
        elif tag == "script":
            self.scripts.append(data)

    @property
    def figures(self) -> list[dict[str, Any]]:
        return [figure for packed in self.packed for figure in unpack(packed)[0]]

    @property
    def libraries(self) -> list[str]:
        return [unpack(packed)[1] for packed in self.packed]


def unpack(packed: str) -> tuple[list[dict[str, Any]], str]:
    """Figures and library that are packed into a page."""
    figures, _, library = gzip.decompress(base64.b85decode(packed.replace(",", "<"))).decode().partition("\n")
    return json.loads(figures), library


def title_of(figure: dict[str, Any]) -> str:
    """Title of a figure on a page."""
    text: str = figure["layout"]["meta"]["labkit"]["title"]
    return text
