"""The time of a step, stage by stage, on both sides."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from labkit.figures.room import bars_end, left_of, legend_below
from labkit.figures.summary import stages_subtitle
from labkit.figures.theme import PART_COLORS, finish, heading, write_after
from labkit.stages import Phase
from labkit.studies.frames import names, number, stage_frame

if TYPE_CHECKING:
    from labkit.harness import Comparison

FADED = 0.42  # opacity of the baseline's bars


def stage_figure(comparison: Comparison, phase: Phase = Phase.DECODE) -> go.Figure:
    """Milliseconds of each stage: both sides as whole steps above, stage by stage below, with a legend of the stages.

    A side that cannot tell its stages apart (a compiled model) is left out, and the figure says so.
    """
    frame = stage_frame(comparison, phase)
    timed = {role: name for role, name in names(comparison).items() if frame[role].any()}
    figure = make_subplots(rows=2, cols=1, row_heights=[0.22, 0.78], vertical_spacing=0.13)
    left = left_of([*timed.values(), *frame.index])
    labels = {role: _labels(frame, role) for role in timed}
    for stage, row in frame.iterrows():
        figure.add_bar(
            x=row[list(timed)].tolist(),
            y=list(timed.values()),
            name=stage,
            orientation="h",
            marker={"color": PART_COLORS[stage], "line": {"color": "white", "width": 1}},
            hovertemplate=f"{stage} %{{x:.3f}} ms<extra>%{{y}}</extra>",
            row=1,
            col=1,
        )
    for role, name in timed.items():
        figure.add_bar(
            x=frame[role].tolist(),
            y=frame.index.tolist(),
            name=name,
            orientation="h",
            offsetgroup=role,
            showlegend=False,
            marker={
                "color": [PART_COLORS[stage] for stage in frame.index],
                "opacity": FADED if role == "baseline" else 1.0,
            },
            text=labels[role],
            textposition="outside",
            textfont={"size": 12},
            cliponaxis=False,
            hovertemplate=f"{name} %{{y}}: %{{x:.3f}} ms<extra></extra>",
            row=2,
            col=1,
        )
    figure.update_layout(barmode="stack")
    wholes = [float(frame[role].sum()) for role in timed]
    texts = [f"{number(whole)} ms" for whole in wholes]
    write_after(figure, texts, wholes, list(timed.values()), left, unit=" ms", log=False, row=1)
    values, texts = [ms for role in timed for ms in frame[role]], [text for role in timed for text in labels[role]]
    figure.update_xaxes(range=[0, bars_end(values, texts, left, size=12)], ticksuffix=" ms", row=2, col=1)
    figure.update_xaxes(nticks=7)
    figure.update_yaxes(autorange="reversed")
    figure.add_annotation(heading("whole step", left=left), row=1, col=1)
    figure.add_annotation(heading(_explained(comparison, timed), left=left), row=2, col=1)
    forward_pass = "a decode step" if phase is Phase.DECODE else "the prompt's pass"
    finish(figure, f"Where the time of {forward_pass} goes", stages_subtitle(comparison), height=640)
    return legend_below(figure, list(frame.index), left, axis=36)


def _explained(comparison: Comparison, timed: dict[str, str]) -> str:
    missing = [name for role, name in names(comparison).items() if role not in timed]
    if missing:
        return f"by stage; {' and '.join(missing)} cannot tell the stages apart"
    return f"by stage: {timed['baseline']} faded, {timed['candidate']} in full"


def _labels(frame: pd.DataFrame, role: str) -> list[str]:
    times = [f"{number(value)} ms" if value else "not timed alone" for value in frame[role]]
    if role == "baseline":
        return times
    return [
        f"{time}, {number(slow / fast, 2)}x" if slow and fast else time
        for time, slow, fast in zip(times, frame["baseline"], frame[role], strict=True)
    ]
