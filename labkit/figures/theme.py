"""What all figures share: one colour per stage, one per side, the type sizes, and the wording of a title."""

import textwrap

import plotly.graph_objects as go

from labkit.stages import Stage

# The four Deep-Fusion regions have the full colours; the GEMM that follows a region has a tint of it.
STAGE_COLORS: dict[Stage, str] = {
    Stage.EMBED: "#c3cad3",
    Stage.QKV: "#2f6db5",
    Stage.ATTENTION: "#d9702b",
    Stage.ATTN_OUT: "#f0b48a",
    Stage.MLP: "#2f8f5b",
    Stage.MLP_OUT: "#98cdb0",
    Stage.RESIDUAL: "#8159a8",
    Stage.QKV_MLP: "#2b8a96",
    Stage.OUTPUTS: "#c9c19a",
    Stage.ALL_REDUCE: "#b8433f",
    Stage.LM_HEAD: "#caa01e",
    Stage.SAMPLE: "#7d8896",
}
BASELINE, CANDIDATE = "baseline", "candidate"
SIDE_COLORS = {BASELINE: "#9aa5b1", CANDIDATE: "#0b6e99"}
LIMIT = "#b42318"
PUBLISHED = "#a07a2c"
LINE = 110  # letters in a line of a subtitle: as many as a notebook's output shows in a window of 1200 pixels
LINE_HEIGHT, BREAK = 18, "<br>"
INK, SOFT, GRID = "#1f2933", "#5f6c7b", "#e6e9ed"
PAPER, PUBLISHED_PAPER = "#ffffff", "#faf6ec"

_FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, "Liberation Sans", sans-serif'
_AXIS = {
    "gridcolor": GRID,
    "zeroline": False,
    "linecolor": "#aab2bd",
    "ticklabelstandoff": 6,
    "title": {"font": {"size": 13, "color": SOFT}, "standoff": 8},
    "tickfont": {"size": 13},
    "showticksuffix": "last",
}
THEME = go.layout.Template(
    layout=go.Layout(
        font={"family": _FONT, "size": 14, "color": INK},
        title={"x": 0, "y": 1, "yanchor": "top", "pad": {"l": 12, "t": 14}, "font": {"size": 18}},
        paper_bgcolor=PAPER,
        plot_bgcolor=PAPER,
        xaxis=_AXIS,
        yaxis=_AXIS,
        margin={"l": 130, "r": 32, "t": 84, "b": 52},
        bargap=0.35,
        hoverlabel={"font": {"family": _FONT, "size": 13}},
    )
)


def in_lines(*texts: str) -> str:
    """A subtitle of these texts, each on a line of its own; nothing for one without letters."""
    return BREAK.join(text for text in texts if text)


def finish(figure: go.Figure, title: str, subtitle: str, height: int) -> go.Figure:
    """Gives `figure` the theme, a title, a subtitle that says what was measured, and a height in pixels, which grows
    with each line of the subtitle that has to be broken.
    """
    asked = subtitle.split(BREAK)
    lines = [line for text in asked for line in textwrap.wrap(text, LINE)]
    return figure.update_layout(
        template=THEME,
        height=height + LINE_HEIGHT * (len(lines) - len(asked)),
        margin_t=74 + LINE_HEIGHT * len(lines),
        title={"text": title, "subtitle": {"text": BREAK.join(lines), "font": {"size": 13, "color": SOFT}}},
        showlegend=False,
    )


def heading(text: str, color: str = INK) -> dict[str, object]:
    """An annotation above a panel, at its left edge."""
    place = {"xref": "x domain", "yref": "y domain", "x": 0, "y": 1, "xanchor": "left", "yanchor": "bottom"}
    return {**place, "text": text, "showarrow": False, "font": {"size": 14, "color": color}}
