"""Self-contained pages of figures: the figures and plotly.js are packed into the page, and its scripts draw them.

A page loads nothing. A browser that cannot unpack the figures says so in the place of each figure.
"""

from __future__ import annotations

import base64
import gzip
import html
import json
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from labkit.figures.dark import DARK_PAPER, IN_THE_DARK, dark_rules
from labkit.figures.room import BREAK
from labkit.figures.theme import CANDIDATE, CONFIG, INK, LIMIT, META, SIDE_COLORS, SOFT

HERE = Path(__file__).parent
POLICY = (  # for the browser: it loads nothing from outside, for any content of the page
    "default-src 'none'; script-src 'unsafe-inline' 'unsafe-eval'; style-src 'unsafe-inline'; img-src data: blob:; "
    "font-src data:"
)
MARKUP = re.compile(r"&lt;(/?b)&gt;")  # the only markup of plotly's that a caption keeps
DARK_INKS = {
    "ink": IN_THE_DARK[INK], "soft": IN_THE_DARK[SOFT], "line": "#333a43", "code": "#20252b", "paper": DARK_PAPER,
    "accent": IN_THE_DARK[SIDE_COLORS[CANDIDATE]], "tint": "#1b2429", "bad": IN_THE_DARK[LIMIT], "bad-tint": "#2c1c1a",
    "good": "#5cc08a",
}  # fmt: skip
NO_SCRIPTS = (
    "<noscript><p>The figures of this page are drawn by its own scripts, which are switched off.</p></noscript>"
)
PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<main>{figure}</main>
{drawn}
</body>
</html>
"""


@cache
def stylesheet() -> str:
    """The styles of a page: light and dark colours, and its figures on screen and on paper."""
    inks = " ".join(f"--{name}: {color};" for name, color in DARK_INKS.items())
    dark = f":root {{ {inks} color-scheme: dark; }}\n{dark_rules('.figure')}"
    light = (HERE / "page.css").read_text(encoding="utf-8")
    return f"{light}@media screen and (prefers-color-scheme: dark) {{\n{dark}\n}}\n"


class Figures:
    """The figures of one page, in the order of their places."""

    def __init__(self) -> None:
        self._figures: list[Mapping[str, Any]] = []

    def place(self, figure: Mapping[str, Any]) -> str:
        """HTML for the place of a figure, which is given as plotly's JSON. Labkit's figures get a caption."""
        layout = dict(figure.get("layout", {}))
        meta = layout.get("meta")
        heading = meta.get(META) if isinstance(meta, Mapping) else None
        caption = ""
        if heading:
            layout = _without_title(layout, heading["above"])
            lines = (f"<span>{_as_html(line)}</span>" for line in heading["subtitle"].split(BREAK) if line)
            caption = f"<figcaption><b>{_as_html(heading['title'])}</b>{''.join(lines)}</figcaption>"
        self._figures.append({**figure, "layout": layout})
        place = f'<div class="plot" data-figure="{len(self._figures) - 1}"></div>'
        return f'<figure class="figure">{caption}{place}</figure>'

    def drawn(self) -> str:
        """The script that draws all figures, for the end of the page; empty for a page without figures."""
        if not self._figures:
            return ""
        script = f"{unpack_script()}{(HERE / 'page.js').read_text(encoding='utf-8')}"
        data = json.dumps(self._figures, separators=(",", ":"))
        packed = packed_element(f"{data}\n{get_plotlyjs()}".encode())
        return f"{NO_SCRIPTS}\n{packed}\n<script>\n(() => {{\n{script}}})();\n</script>"


def figure_page(figure: go.Figure) -> str:
    """A page of one figure."""
    figures = Figures()
    place = figures.place(json.loads(figure.to_json()) | {"config": CONFIG})
    title = html.escape(re.sub("<[^>]*>", " ", figure.layout.title.text or "figure"))
    return PAGE.format(policy=POLICY, title=title, style=stylesheet(), figure=place, drawn=figures.drawn())


def unpack_script() -> str:
    """The script that unpacks the content of a page's `packed_element`."""
    return (HERE / "unpack.js").read_text(encoding="utf-8")


def packed_element(content: bytes) -> str:
    """An element for unpack.js: the compressed content in digits of base 85 without any "<"."""
    digits = base64.b85encode(gzip.compress(content, 9, mtime=0)).decode().replace("<", ",")
    return f'<script type="text/plain" id="packed">{digits}</script>'


def _without_title(layout: Mapping[str, Any], above: float) -> dict[str, Any]:
    """The layout of a figure whose title took `above` pixels."""
    before = layout["height"]
    untitled = {name: value for name, value in layout.items() if name != "title"}
    untitled |= {"height": before - above, "margin": {**layout["margin"], "t": layout["margin"]["t"] - above}}
    if layout.get("legend", {}).get("yref") == "container":  # a share of the height, from the bottom
        untitled["legend"] = {**layout["legend"], "y": layout["legend"]["y"] * before / untitled["height"]}
    return untitled


def _as_html(text: str) -> str:
    """A title or a line of a subtitle as HTML, with no other markup than <b>."""
    return MARKUP.sub(r"<\1>", html.escape(text, quote=False))
