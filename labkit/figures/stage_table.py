"""The stage table of one capture: where the time of a step goes, with the figures of every stage next to its bar."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from labkit.figures.room import left_of
from labkit.figures.theme import INK, META, MODEBAR, PART_COLORS, SOFT, STAGE_COLORS, finish
from labkit.nsys.analysis.stage_table import IDLE, NO_STAGE, ORDER
from labkit.stages import Phase, Stage
from labkit.statistics import P95_SAMPLES
from labkit.studies.frames import number
from labkit.system.errors import UserError

if TYPE_CHECKING:
    from labkit.nsys.analysis.stage_table import StageTable

ROW, MAP_ROW = 34, 26  # pixels
LEAST = 680  # pixels of width; on a narrower page the figure scrolls instead of squeezing its columns
BARS = 0.27  # share of the width that the bars have; the rest is figures
REST_COLORS = {IDLE: "#dfe3e8", NO_STAGE: "#b9c0c9"}
COLORS = PART_COLORS | REST_COLORS
COVERED = {"GPU": "the GPU's work", "CPU": "the steps' time"}
OUTSIDE = "no layer"
SHADES = [[0, "#ffffff"], [1, STAGE_COLORS[Stage.QKV]]]


def stage_table_figure(table: StageTable, phase: Phase | None = None, *, name: str = "") -> go.Figure:
    """A bar per stage with its figures next to it. A table by layer becomes a map of layers and stages.

    `phase`: by default decode where the table has it. `name`: the capture's, for the title.
    ValueError for a table by rank or process, or without that phase.
    """
    if {"rank", "process"} & set(table.by):
        raise UserError(f"got a table by {', '.join(table.by)}; expected one of all ranks, or of one rank's trace")
    frame, step_name = table.frame, "step"
    steps = sum(table.step_count.values())
    if "phase" in table.by:
        phases = list(frame["phase"].unique())
        chosen = str(phase or (Phase.DECODE if Phase.DECODE in phases else phases[0]))
        if chosen not in phases:
            raise UserError(f"got phase {chosen!r}; expected a phase that the table has: {', '.join(phases)}")
        frame, steps, step_name = frame[frame["phase"] == chosen], table.step_count[chosen], f"{chosen} step"
    by_layer = "layer" in table.by
    figure = _map(frame) if by_layer else _bars(frame)
    lines = [
        f"{number(frame['step_ms'].sum())} ms, mean of {steps} step{'s' * (steps > 1)} on the {table.clock}'s clock "
        f"({table.source.profiler}); {table.coverage:.0%} of {COVERED[table.clock]} belongs to a stage"
    ]
    if by_layer:
        lines.append("µs of a step, by layer and stage")
    else:
        exposed = ", exposed" if frame["exposed_ms"].any() else ""
        few = "" if frame["enough_for_p95"].all() else f"; (P95): of fewer than {P95_SAMPLES} runs, too few"
        gaps = ", gaps" if frame["launch_gap_ms"].any() else ""
        lines.append(f"ms, share, ops{gaps}{exposed}: of a step; median, P95: of a run of the stage{few}")
    title = f"{name}: where" if name else "Where"
    left = left_of(list(frame["stage"])) if not by_layer else 80
    finish(
        figure,
        f"{title} the time of a {step_name} goes",
        "<br>".join(lines),
        figure.layout.height,
        top=8 if by_layer else MODEBAR,
        left=left,
    )
    figure.layout.meta[META]["least"] = LEAST
    return figure


def _bars(frame: pd.DataFrame) -> go.Figure:
    names = frame["stage"].tolist()
    figure = go.Figure(
        go.Bar(
            x=frame["step_ms"].tolist(),
            y=names,
            orientation="h",
            marker_color=[COLORS[name] for name in names],
            hovertemplate="%{y}: %{x:.4f} ms a step<extra></extra>",
        )
    )
    cells = _cells(frame)
    annotations = []
    for column, (heading, texts) in enumerate(cells.items()):
        x = BARS + (1 - BARS) * (column + 1) / len(cells)
        place = {"x": x, "xref": "paper", "xanchor": "right", "showarrow": False, "align": "right"}
        annotations.append(
            {**place, "y": -1.05, "text": f"<b>{heading.replace(' ', '<br>')}</b>", "font": {"size": 13, "color": SOFT}}
        )
        annotations += [
            {**place, "y": y, "text": text, "font": {"size": 13, "color": INK}} for y, text in enumerate(texts)
        ]
    figure.update_layout(annotations=annotations)
    figure.update_xaxes(domain=[0, BARS], ticksuffix=" ms", nticks=4)
    figure.update_yaxes(range=[len(names) - 0.5, -1.7], showgrid=False, type="category")
    return figure.update_layout(height=60 + ROW * (len(names) + 1))


def _cells(frame: pd.DataFrame) -> dict[str, list[str]]:
    """The figures next to the bars, as text, by heading. Columns without figures are left out."""
    rest = frame["stage"].isin(REST_COLORS).tolist()
    bounds = frame["enough_for_p95"].tolist()
    operations = frame["operations"].round(1)
    columns = {
        "ms": [number(ms) for ms in frame["step_ms"]],
        "share": [f"{share:.1%}" for share in frame["share"]],
        "runs": [f"{count:,}" for count in frame["count"]],
        "median µs": [number(ms * 1e3) for ms in frame["median_ms"]],
        "P95 µs": [
            text if bound else f"({text})"
            for text, bound in zip((number(ms * 1e3) for ms in frame["p95_ms"]), bounds, strict=True)
        ],
        "ops": [f"{count:g}" if count else "" for count in operations],
        "gaps µs": [
            "" if no_gap or np.isnan(gap) else number(gap * 1e3)
            for gap, no_gap in zip(frame["launch_gap_ms"], rest, strict=True)
        ],
        "exposed ms": [number(ms) if ms else "" for ms in frame["exposed_ms"]],
    }
    return {heading: texts for heading, texts in columns.items() if any(texts)}


def _map(frame: pd.DataFrame) -> go.Figure:
    layer = frame["layer"].astype("str").where(frame["layer"].notna(), OUTSIDE)
    wide = frame.assign(layer=layer, us=frame["step_ms"] * 1e3).pivot(index="layer", columns="stage", values="us")
    rows = sorted(set(layer) - {OUTSIDE}, key=int) + [OUTSIDE] * bool((layer == OUTSIDE).any())
    wide = wide.loc[rows, sorted(wide.columns, key=list(ORDER).index)]
    inside = wide.drop(index=OUTSIDE, errors="ignore").to_numpy()
    most = np.nanmax(inside) if np.isfinite(inside).any() else None
    figure = go.Figure(
        go.Heatmap(
            z=wide.to_numpy().tolist(),
            x=[name.replace("+", "+<br>") for name in wide.columns],
            y=[name if name == OUTSIDE else f"layer {name}" for name in rows],
            text=[["" if np.isnan(us) else number(us, 3) for us in row] for row in wide.to_numpy()],
            texttemplate="%{text}",
            textfont={"size": 12},
            colorscale=SHADES,
            zmin=0,
            zmax=most and 1.6 * most,  # the darkest shade would hide the figures
            showscale=False,
            xgap=2,
            ygap=2,
            hoverongaps=False,
            hovertemplate="%{y} %{x}: %{z:.2f} µs a step<extra></extra>",
        )
    )
    figure.update_xaxes(
        side="top", showgrid=False, tickangle=0, ticks="", tickfont={"size": 12 if len(wide.columns) < 12 else 11}
    )
    figure.update_yaxes(autorange="reversed", showgrid=False, ticks="")
    return figure.update_layout(height=90 + MAP_ROW * len(rows))
