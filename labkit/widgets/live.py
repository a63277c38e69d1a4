"""Live notebooks, which have a user at the page, and content that can be replaced after it was shown."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go
from IPython import get_ipython
from IPython.display import DisplayHandle, Markdown, display
from ipywidgets import Output, Widget

from labkit.figures.theme import CONFIG
from labkit.widgets.page import OWN

PLOTLY_MIME_TYPE = "application/vnd.plotly.v1+json"
FIGURE_CONFIG = CONFIG | {"responsive": False}  # JupyterLab resizes figures itself
UNSEEN = "This part of a live notebook is shown once the notebook is trusted: File > Trust Notebook."


def is_live() -> bool:
    """Whether the running cell was sent by a user who could answer an input prompt.

    JupyterLab, Notebook and VS Code allow prompts with every cell; papermill, nbconvert and nbclient do not.
    """
    kernel = getattr(get_ipython(), "kernel", None)
    if kernel is None:
        return False
    return bool(kernel.get_parent("shell").get("content", {}).get("allow_stdin", False))


@dataclass(frozen=True)
class Execution:
    """One execution of a cell."""

    cell: str  # id of the cell; empty if the page does not tell it
    message: str  # id of the message that started the execution

    @classmethod
    def now(cls) -> Execution:
        """The execution of the running cell."""
        kernel = getattr(get_ipython(), "kernel", None)
        parent = {} if kernel is None else kernel.get_parent("shell")
        return cls(parent.get("metadata", {}).get("cellId", ""), parent.get("header", {}).get("msg_id", ""))

    def replaced_by(self, other: Execution) -> bool:
        """Whether `other` is a later execution of the same cell, which removed the outputs of this one."""
        return bool(self.cell) and self.cell == other.cell and self.message != other.message


class Slot:
    """Content of a cell that can be replaced by newer content, also from a thread.

    Live, the content is in a widget, which lives as long as the kernel: a page that is opened again shows the latest
    content. In a batch run it is an output of the cell. A widget that is replaced is closed, since the kernel and the
    page would otherwise keep it with all its data.
    """

    def __init__(self, content: Any) -> None:
        self._content = content
        self._widget: Output | None = None
        self._handle: DisplayHandle | None = None
        if is_live():
            self._widget = Output(outputs=(_as_output(content),))
            self._widget.add_class(OWN)
            display(self._widget._repr_mimebundle_() | {"text/plain": UNSEEN}, raw=True)
        else:
            self._handle = display(as_bundle(content), raw=True, display_id=True)

    def replace(self, content: Any) -> None:
        before, self._content = self._content, content
        if self._widget:
            self._widget.outputs = (_as_output(content),)
        elif self._handle:
            self._handle.update(as_bundle(content), raw=True)
        if isinstance(before, Widget) and before is not content:
            before.close()

    def close(self) -> None:
        """Removes the content and its widgets from the page."""
        for widget in (self._content, self._widget):
            if isinstance(widget, Widget):
                widget.close()


def _as_output(content: Any) -> dict[str, Any]:
    return {"output_type": "display_data", "data": as_bundle(content), "metadata": {}}


def as_bundle(content: Any) -> dict[str, Any]:
    """The data by MIME type of a figure, Markdown text, a table or a bundle that is ready."""
    if isinstance(content, go.Figure):
        figure = json.loads(content.to_json())
        return {PLOTLY_MIME_TYPE: figure | {"config": FIGURE_CONFIG}, "text/plain": content.layout.title.text}
    if isinstance(content, dict):
        return content
    shown = Markdown(content) if isinstance(content, str) else content
    shell = get_ipython()
    return shell.display_formatter.format(shown)[0] if shell else {"text/plain": repr(shown)}
