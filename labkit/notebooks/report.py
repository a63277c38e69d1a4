"""An executed notebook as one HTML file that needs no network and no other file."""

import json
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

from jinja2 import FileSystemLoader, pass_context
from nbconvert.exporters import HTMLExporter
from nbformat import NotebookNode
from plotly.offline import get_plotlyjs
from traitlets.config import Config

from labkit.notebooks.contained import contained
from labkit.notebooks.failure import Failure

PLOTLY_MIME_TYPE = "application/vnd.plotly.v1+json"
# The template shows nothing for the last two: a page without a kernel cannot run them.
_KINDS = (PLOTLY_MIME_TYPE, "text/html", "text/markdown", "image/svg+xml", "image/png", "image/jpeg", "text/plain")
_LIVE_KINDS = ("application/javascript", "application/vnd.jupyter.widget-view+json")


class _Exporter(HTMLExporter):
    """Turns cells of text into HTML that stays within its cell."""

    @pass_context
    def markdown2html(self, context: Any, source: str) -> str:
        return contained(super().markdown2html(context, source))


def html_report(
    notebook: NotebookNode,
    *,
    title: str,
    parameters: Mapping[str, Any],
    seconds: float,
    failure: Failure | None = None,
) -> str:
    """`notebook` as a page; plotly.js is inlined once if it holds figures, and widgets are left out.

    The page's Content-Security-Policy lets a browser load nothing from outside, whatever the outputs hold.
    """
    exporter = _Exporter(
        config=Config(NbConvertBase={"display_data_priority": [*_KINDS, *_LIVE_KINDS]}),
        extra_loaders=[FileSystemLoader(Path(__file__).parent)],
        template_name="classic",
        template_file="report.html.j2",
        exclude_anchor_links=True,
    )
    exporter.register_filter("figure_json", _figure_json)
    exporter.register_filter("contained", contained)
    plotly_slot = f"plotly-{uuid4().hex}"  # nbconvert would parse megabytes of script; no notebook holds this text
    facts = {
        "title": heading(notebook) or title,
        "parameters": dict(parameters),
        "seconds": seconds,
        "failure": failure,
        "made": f"{datetime.now():%Y-%m-%d %H:%M}",
        "plotly_slot": plotly_slot if _has_figures(notebook) else None,
    }
    page, _ = exporter.from_notebook_node(notebook, resources={"report": facts})
    return page.replace(plotly_slot, get_plotlyjs())


def _figure_json(figure: Mapping[str, Any]) -> str:
    """Without any "<": neither "</script>" nor "<!--" in a title may mean something to the browser."""
    return json.dumps(figure).replace("<", "\\u003c")


def heading(notebook: NotebookNode) -> str | None:
    """The first heading of a notebook."""
    lines = (line for cell in notebook.cells if cell.cell_type == "markdown" for line in cell.source.splitlines())
    return next((line.removeprefix("# ").strip() for line in lines if line.startswith("# ")), None)


def _has_figures(notebook: NotebookNode) -> bool:
    outputs = (output for cell in notebook.cells for output in cell.get("outputs", []))
    return any(PLOTLY_MIME_TYPE in output.get("data", {}) for output in outputs)
