"""Converts an executed notebook to one HTML file that needs no network and no other file."""

from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

from jinja2 import FileSystemLoader, pass_context
from nbconvert.exporters import HTMLExporter
from nbformat import NotebookNode
from traitlets.config import Config

from labkit.figures.page import POLICY, Figures, stylesheet
from labkit.notebooks.contained import contained
from labkit.notebooks.failure import Failure
from labkit.studies.settings import setting_words
from labkit.system.progress import OUTCOME_MIME_TYPE
from labkit.system.shown import shown

PLOTLY_MIME_TYPE = "application/vnd.plotly.v1+json"
# The template does not show the kinds in _LIVE_KINDS: a page without a kernel cannot run them.
_KINDS = (PLOTLY_MIME_TYPE, "text/html", "text/markdown", "image/svg+xml", "image/png", "image/jpeg", "text/plain")
_LIVE_KINDS = ("application/javascript", "application/vnd.jupyter.widget-view+json")


class _Exporter(HTMLExporter):
    """Converts Markdown cells to HTML that stays within its cell."""

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
    """`notebook` as a page that begins with its results. The page draws the figures; widgets are left out.

    With the page's Content-Security-Policy a browser loads nothing from outside, even if outputs ask for it.
    """
    exporter = _Exporter(
        config=Config(NbConvertBase={"display_data_priority": [*_KINDS, *_LIVE_KINDS]}),
        extra_loaders=[FileSystemLoader(Path(__file__).parent)],
        template_name="classic",
        template_file="report.html.j2",
        exclude_anchor_links=True,
    )
    figures = Figures()
    exporter.register_filter("place", figures.place)
    exporter.register_filter("contained", contained)
    slot = f"figures-{uuid4().hex}"  # replaced by the figures' script at the end; unique
    heading, notebook = split_heading(notebook)
    outcomes = _outcomes(notebook)
    used = {name: value for outcome in outcomes for name, value in outcome.get("of", {}).items() if name in parameters}
    parameters = {**parameters, **used}
    facts = {
        "title": heading or title,
        "outcomes": outcomes,
        "parameters": {
            name.replace("_", " "): shown(setting_words(name, value))
            for name, value in parameters.items()
            if value not in (None, "")
        },
        "seconds": seconds,
        "failure": failure,
        "made": f"{datetime.now():%Y-%m-%d %H:%M}",
        "policy": POLICY,
        "style": stylesheet(),
        "slot": slot,
    }
    page, _ = exporter.from_notebook_node(notebook, resources={"report": facts})
    before, after = page.split(slot)
    return f"{before}{figures.drawn()}{after}"


def split_heading(notebook: NotebookNode) -> tuple[str | None, NotebookNode]:
    """The heading at the beginning of the notebook, or None, and the notebook without it: the page shows it on top."""
    first = notebook.cells[0] if notebook.cells else None
    if first is None or first.cell_type != "markdown" or not first.source.startswith("# "):
        return None, notebook
    heading, _, rest = first.source.partition("\n")
    cell = NotebookNode(first | {"source": rest.strip()})
    return heading.removeprefix("# ").strip(), NotebookNode(notebook | {"cells": [cell, *notebook.cells[1:]]})


def _outcomes(notebook: NotebookNode) -> list[dict[str, Any]]:
    outputs = (output.get("data", {}) for cell in notebook.cells for output in cell.get("outputs", []))
    return [data[OUTCOME_MIME_TYPE] for data in outputs if OUTCOME_MIME_TYPE in data]
