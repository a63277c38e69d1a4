"""Texts of figures: title, subtitle and annotations."""

import plotly.graph_objects as go


def title(figure: go.Figure) -> str:
    return words(figure.layout.title.text)


def subtitle(figure: go.Figure) -> str:
    return words(figure.layout.title.subtitle.text)


def annotations(figure: go.Figure) -> list[str]:
    return [annotation.text for annotation in figure.layout.annotations]


def texts(figure: go.Figure) -> str:
    """All annotations of a figure as one text."""
    return " ".join(annotations(figure))


def words(text: str) -> str:
    """The text without line breaks."""
    return text.replace("<br>", " ")
