"""Converts an executed notebook to one HTML file that needs no network and no other file."""

import re
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
from labkit.notebooks.failure import Failure
from labkit.studies.settings import setting_words
from labkit.system.progress import OUTCOME_MIME_TYPE
from labkit.system.shown import shown

PLOTLY_MIME_TYPE = "application/vnd.plotly.v1+json"
# The template does not show the kinds in _LIVE_KINDS: a page without a kernel cannot run them.
_KINDS = (PLOTLY_MIME_TYPE, "text/html", "text/markdown", "image/svg+xml", "image/png", "image/jpeg", "text/plain")
_LIVE_KINDS = ("application/javascript", "application/vnd.jupyter.widget-view+json")

# Comments, and elements whose content is raw text. Without an end tag they reach to the end of the page.
OPENING = re.compile(
    r"<!--|<(script|style|textarea|title|xmp|iframe|noembed|noframes|noscript|plaintext)\b[^>]*>", re.IGNORECASE
)


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
    outcomes: list[dict[str, Any]] = outputs_of_type(notebook, OUTCOME_MIME_TYPE)
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


def outputs_of_type(notebook: NotebookNode, mime_type: str) -> list[Any]:
    """The data of this type in the outputs of all cells."""
    outputs = (output.get("data", {}) for cell in notebook.cells for output in cell.get("outputs", []))
    return [data[mime_type] for data in outputs if mime_type in data]


def contained(html: str) -> str:
    """`html` with the openings of unclosed comments and raw-text elements turned into text. They would swallow the rest
    of the page.
    """
    parts, position = [], 0
    while opening := OPENING.search(html, position):
        parts.append(html[position : opening.start()])
        name = opening[1]
        end = re.compile(rf"</{name}\s*>" if name else "-->", re.IGNORECASE).search(html, opening.end())
        if end is None:
            parts.append(f"&lt;{opening[0][1:]}")
            position = opening.end()
            continue
        inside = html[opening.end() : end.start()]
        if (name or "").lower() == "script" and "<!--" in inside:
            # After "<!--" a browser also counts script tags inside the script's text.
            inside = re.sub(r"<(?=script)", r"\\x3c", inside, flags=re.IGNORECASE)
        parts += [opening[0], inside, end[0]]
        position = end.end()
    return "".join([*parts, html[position:]])
