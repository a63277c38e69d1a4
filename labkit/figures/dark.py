"""Figures on a dark page: styles that replace the colours of ink and paper with dark ones.

The browser applies them, because only it knows its colour scheme; the figures themselves stay as they are.
"""

from labkit.figures.theme import AXIS, CANDIDATE, GRID, INK, LIMIT, PAPER, PUBLISHED, PUBLISHED_PAPER, SIDE_COLORS, SOFT

DARK_PAPER = "#16191d"
IN_THE_DARK = {
    INK: "#e4e8ed",
    SOFT: "#a3aebb",
    AXIS: "#5d6773",
    GRID: "#333a43",
    PUBLISHED_PAPER: "#29251b",
    PUBLISHED: "#cfa95c",
    LIMIT: "#f47c6c",
    SIDE_COLORS[CANDIDATE]: "#3a9fcd",
}


def dark_rules(scope: str, paper: str = DARK_PAPER) -> str:
    """CSS for the figures inside elements of the selector `scope`, which stand on the colour `paper`."""
    rules = [f"{scope} .main-svg {{ background: transparent !important; }}"]
    for light, dark in IN_THE_DARK.items():
        for style in ("fill", "stroke"):
            # the first as a browser writes it, the second as plotly.js does
            selectors = f'[style*="{style}: {_rgb(light)}"], [style*="{style}:{light}"]'
            rules.append(f"{scope} :is({selectors}) {{ {style}: {dark} !important; }}")
    for style in ("fill", "stroke"):  # but letters on a bar stay white
        rules.append(f'{scope} :is(rect, path)[style*="{style}: {_rgb(PAPER)}"] {{ {style}: {paper} !important; }}')
    rules.append(f"{scope} .modebar-group {{ background: transparent !important; }}")
    rules.append(f"{scope} .modebar-btn path {{ fill: {IN_THE_DARK[SOFT]} !important; }}")
    return "\n".join(rules)


def _rgb(color: str) -> str:
    """A colour as a browser writes it back: "rgb(31, 41, 51)"."""
    red, green, blue = (int(color[at : at + 2], 16) for at in (1, 3, 5))
    return f"rgb({red}, {green}, {blue})"
