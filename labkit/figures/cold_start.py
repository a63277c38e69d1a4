"""What people wait for: the start of each side, its loading, the prompt and the tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import plotly.graph_objects as go

from labkit.figures.room import left_of, legend_below
from labkit.figures.summary import subtitle_of
from labkit.figures.theme import finish, in_lines, write_after
from labkit.studies.frames import names, number, sides

if TYPE_CHECKING:
    from labkit.harness import Comparison, Measurement

PHASES = {"start": "#7d8896", "load": "#5b3a29", "prompt": "#d9702b", "tokens": "#2f6db5"}
HOW = "start and loading: once, without an interval, with the harness's own imports; prompt and tokens: medians"


def cold_start_figure(comparison: Comparison) -> go.Figure | str:
    """Seconds from the start of each side's process to the last token of one generation: a bar of each side, in parts.

    Markdown text for a record that has no times of starting.
    """
    parts = {
        name: _parts(side) for name, side in zip(names(comparison).values(), sides(comparison).values(), strict=True)
    }
    known = {name: seconds for name, seconds in parts.items() if seconds is not None}
    if len(known) < len(parts):
        return "This record has no times of starting and loading."
    figure, left = go.Figure(), left_of(list(known))
    for phase, color in PHASES.items():
        figure.add_bar(
            x=[seconds[phase] for seconds in known.values()],
            y=list(known),
            name=phase,
            orientation="h",
            marker={"color": color, "line": {"color": "white", "width": 1}},
            hovertemplate=f"{phase} %{{x:.2f}} s<extra>%{{y}}</extra>",
        )
    wholes = [sum(seconds.values()) for seconds in known.values()]
    write_after(figure, [f"{number(whole)} s" for whole in wholes], wholes, list(known), left, unit=" s", log=False)
    figure.update_xaxes(nticks=7)
    figure.update_yaxes(autorange="reversed")
    figure.update_layout(barmode="stack")
    finish(figure, "From the start to the last token", in_lines(subtitle_of(comparison), HOW), height=300)
    return legend_below(figure, list(PHASES), left, axis=36)


def _parts(side: Measurement) -> dict[str, float] | None:
    """Seconds of each phase; None if the record lacks one."""
    if side.start_to_ready_s is None or side.load_s is None or side.first_run_s is None:
        return None
    return {
        "start": max(side.start_to_ready_s - side.load_s - side.first_run_s, 0.0),
        "load": side.load_s,
        "prompt": side.summary("ttft").median / 1e3,
        "tokens": side.per_token_ms * (side.case.new_tokens - 1) / 1e3,
    }
