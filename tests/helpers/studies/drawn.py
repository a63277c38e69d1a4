"""Text of figures, without line breaks."""

import plotly.graph_objects as go


def title(figure: go.Figure) -> str:
    return words(figure.layout.title.text)


def subtitle(figure: go.Figure) -> str:
    return words(figure.layout.title.subtitle.text)


def words(text: str) -> str:
    return text.replace("<br>", " ")
