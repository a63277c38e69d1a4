"""Whether a notebook is live, that is, somebody sits at it; and outputs that can be replaced later in any notebook."""

from __future__ import annotations

import json
from typing import Any

import plotly.graph_objects as go
from IPython import get_ipython
from IPython.display import DisplayHandle, Markdown, display
from ipywidgets import Widget

PLOTLY_MIME_TYPE = "application/vnd.plotly.v1+json"
FIGURE_CONFIG = {"responsive": True, "displaylogo": False}


def is_live() -> bool:
    """Whether the cell that runs now was sent by somebody who could answer an input prompt.

    JupyterLab, Notebook and VS Code say so with every cell; papermill, nbconvert and nbclient say that they cannot.
    """
    kernel = getattr(get_ipython(), "kernel", None)
    if kernel is None:
        return False
    return bool(kernel.get_parent("shell").get("content", {}).get("allow_stdin", False))


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
