"""Notebooks run for their pages; what a browser would fetch from outside for one, and the figures that are in it."""

import json
import os
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from labkit.notebooks import RunReport, run_notebook

LOADING = {"src", "href", "srcset", "data", "action", "poster", "background", "formaction"}


def run_in(folder: Path, notebook: Path, parameters: dict[str, Any]) -> RunReport:
    """`notebook` run with `folder` as the current one; results are in its `out`."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        return run_notebook(notebook, parameters, folder / "out")
    finally:
        os.chdir(before)


class Page(HTMLParser):
    """Elements of an HTML page: `outside` references in attributes and styles, `scripts` by their text, and `text`."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.outside: list[str] = []
        self.scripts: list[str] = []
        self.figures: list[dict[str, Any]] = []
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
        elif tag == "script" and kind == "application/json":
            self.figures.append(json.loads(data))
        elif tag == "script":
            self.scripts.append(data)
