"""Whether a notebook is live, that is, somebody sits at it; and outputs that can be replaced later in any notebook."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go
from IPython import get_ipython
from IPython.display import DisplayHandle, Markdown, display
from ipywidgets import HTML, Widget

from labkit.figures.dark import dark_rules
from labkit.figures.theme import CONFIG

PLOTLY_MIME_TYPE = "application/vnd.plotly.v1+json"
FIGURE_CONFIG = CONFIG | {"responsive": False}  # JupyterLab itself tells a figure of a new width
DARK_PAGE = 'body[data-jp-theme-light="false"] .js-plotly-plot'


def is_live() -> bool:
    """Whether the cell that runs now was sent by somebody who could answer an input prompt.

    JupyterLab, Notebook and VS Code say so with every cell; papermill, nbconvert and nbclient say that they cannot.
    """
    kernel = getattr(get_ipython(), "kernel", None)
    if kernel is None:
        return False
    return bool(kernel.get_parent("shell").get("content", {}).get("allow_stdin", False))


def styles() -> HTML:
    """A widget without looks of its own that gives a page's figures the colours of JupyterLab's dark theme."""
    return HTML(f"<style>{dark_rules(DARK_PAGE, 'var(--jp-layout-color0)')}</style>", layout={"display": "none"})


@dataclass(frozen=True)
class Execution:
    """A cell that ran: which one, empty where the page does not tell, and which time."""

    cell: str
    message: str

    @classmethod
    def now(cls) -> Execution:
        """Of the cell that runs now."""
        kernel = getattr(get_ipython(), "kernel", None)
        parent = {} if kernel is None else kernel.get_parent("shell")
        return cls(parent.get("metadata", {}).get("cellId", ""), parent.get("header", {}).get("msg_id", ""))

    def replaced_by(self, other: Execution) -> bool:
        """Whether `other` is the same cell, run again, so that the outputs of this run are gone."""
        return bool(self.cell) and self.cell == other.cell and self.message != other.message


class Slot:
    """One output of a cell, shown now and replaced whenever there is something newer, also from a thread.

    A widget that is replaced is closed, since the kernel and the page would else keep it, with all that it holds.
    """

    def __init__(self, content: Any) -> None:
        self._content = content
        self._handle: DisplayHandle = display(as_bundle(content), raw=True, display_id=True)  # type: ignore[assignment]

    def replace(self, content: Any) -> None:
        bundle = as_bundle(content)
        if PLOTLY_MIME_TYPE in bundle:  # plotly's renderer in JupyterLab draws an output only once, so start a new one
            self._handle.update({"text/plain": bundle["text/plain"]}, raw=True)
        self._handle.update(bundle, raw=True)
        before, self._content = self._content, content
        if isinstance(before, Widget) and before is not content:
            before.close()


def as_bundle(content: Any) -> dict[str, Any]:
    """A figure, Markdown text, a table or a ready bundle as data by MIME type."""
    if isinstance(content, go.Figure):
        figure = json.loads(content.to_json())
        return {PLOTLY_MIME_TYPE: figure | {"config": FIGURE_CONFIG}, "text/plain": content.layout.title.text}
    if isinstance(content, dict):
        return content
    shown = Markdown(content) if isinstance(content, str) else content
    shell = get_ipython()
    return shell.display_formatter.format(shown)[0] if shell else {"text/plain": repr(shown)}
