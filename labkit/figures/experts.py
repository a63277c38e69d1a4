"""Figures of a mixture of experts: what rows choose, what steps read, and what the choice costs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from labkit.figures.published_panels import OWN_SCALES, add_measured, add_published, source_lines
from labkit.figures.room import bars_end, left_of, legend_below
from labkit.figures.theme import (
    LIMIT,
    SIDE_COLORS,
    SOFT,
    STAGE_COLORS,
    finish,
    heading,
    in_lines,
    panels,
    slider,
)
from labkit.published import published
from labkit.stages import Stage
from labkit.studies.frames import number

if TYPE_CHECKING:
    from labkit.studies.experts_study import ExpertsStudy, TimedPair

MARGIN = 70  # pixels left of the axes
CELL, LEAST, MOST = 14, 150, 460  # pixels: of a row of a heat map; the least and the most of a whole one
SLIDER = 80  # pixels above the axes
SHARES = [[0.0, "#f4f7f9"], [0.5, "#5aa2bd"], [1.0, "#0b3d52"]]


def experts_figure(study: ExpertsStudy) -> go.Figure:
    """A heat map: the share of the text's choices that each expert of each layer got."""
    counts = np.asarray(study.counts)
    shares = 100 * counts / counts.sum(1, keepdims=True)
    figure = go.Figure()
    figure.add_heatmap(
        z=shares, colorscale=SHARES, zmin=0, xgap=1, ygap=1, customdata=counts,
        colorbar={"ticksuffix": " %", "thickness": 12, "title": {"text": "of a layer", "font": {"size": 12}}},
        hovertemplate="layer %{y}, expert %{x}: %{customdata} tokens, %{z:.1f} %<extra></extra>",
    )  # fmt: skip
    _axes(figure, "layer")
    even = f"even choices: {100 / study.experts:.3g} % for each expert"
    height = _height(len(counts)) + 90
    return finish(figure, "Which experts the tokens chose", in_lines(_subtitle(study), even), height, left=MARGIN)


def tokens_figure(study: ExpertsStudy) -> go.Figure:
    """The experts of each new token. A slider chooses the layer, and works on a page without a notebook."""
    figure, layers = go.Figure(), range(len(study.chosen))
    for layer in layers:
        points = [(token, expert) for token, chosen in enumerate(study.chosen[layer], start=1) for expert in chosen]
        figure.add_scatter(
            x=[expert for _, expert in points], y=[token for token, _ in points], mode="markers", visible=layer == 0,
            marker={"symbol": "square", "size": 9, "color": SIDE_COLORS["candidate"]}, showlegend=False,
            hovertemplate="token %{y}: expert %{x}<extra></extra>",
        )  # fmt: skip
    _axes(figure, "new token")
    figure.update_xaxes(range=[-0.6, study.experts - 0.4])
    steps: list[dict[str, Any]] = [
        {"method": "restyle", "label": str(layer), "args": ["visible", [other == layer for other in layers]]}
        for layer in layers
    ]
    text = in_lines(_subtitle(study), f"each token passes {study.of_a_row} experts of every layer")
    height = _height(len(study.chosen[0])) + SLIDER + 60
    finish(figure, "Token by token", text, height, top=SLIDER, left=MARGIN)
    return figure.update_layout(sliders=[slider(steps, 0, "layer: ", pad_bottom=20)])


def reads_figure(study: ExpertsStudy) -> go.Figure:
    """Above, the bytes of experts that a step reads, by batch, next to the formula; below, the time of a step."""
    batches = [read.batch for read in study.reads]
    figure = panels([230, 170], 90)
    layers = len(study.counts)

    def megabytes(experts: float) -> float:
        return experts * layers * study.expert_bytes / 1e6

    read, even = "read by the steps", "E(1 - (1 - k/E)^batch), even choices"
    whole = "all experts"
    figure.add_scatter(
        x=batches, y=[megabytes(point.read) for point in study.reads], mode="markers", name=read,
        marker={"size": 11, "color": SIDE_COLORS["candidate"]}, customdata=[point.read for point in study.reads],
        hovertemplate="batch %{x}: %{y:.4g} MB, %{customdata:.3g} experts of a layer<extra></extra>", row=1, col=1,
    )  # fmt: skip
    between = np.geomspace(batches[0], max(batches[-1], batches[0] + 1), 60)
    figure.add_scatter(
        x=between, y=[megabytes(study.expected(rows)) for rows in between], mode="lines", name=even,
        line={"color": SOFT, "width": 1.8}, hoverinfo="skip", row=1, col=1,
    )  # fmt: skip
    figure.add_scatter(
        x=[between[0], between[-1]], y=[megabytes(study.experts)] * 2, mode="lines", name=whole,
        line={"color": LIMIT, "width": 1.4, "dash": "dot"}, hoverinfo="skip", row=1, col=1,
    )  # fmt: skip
    times = {
        "experts": ([point.experts_ms for point in study.reads], SIDE_COLORS["candidate"]),
        "the whole step": ([point.step_ms for point in study.reads], SIDE_COLORS["baseline"]),
    }
    for name, (milliseconds, color) in times.items():
        figure.add_scatter(
            x=batches, y=milliseconds, mode="lines+markers", name=name, line={"color": color, "width": 2},
            marker={"size": 9}, hovertemplate="batch %{x}: %{y:.3g} ms<extra>" + name + "</extra>", row=2, col=1,
        )  # fmt: skip
    figure.update_xaxes(type="log", tickvals=batches, ticktext=list(map(str, batches)))
    figure.update_xaxes(title="sequences in the batch", row=2, col=1)
    figure.update_yaxes(rangemode="tozero", tickformat="~g")
    figure.add_annotation(heading("<b>MB of experts that a decode step reads</b>", left=MARGIN), row=1, col=1)
    figure.add_annotation(heading("<b>ms of a decode step</b>", left=MARGIN), row=2, col=1)
    words = f"{study.experts} experts in each of {layers} layers, {study.of_a_row} of them for a token"
    finish(figure, "What a step reads", in_lines(_subtitle(study), words), height=510)
    return legend_below(figure, [read, even, whole, *times], MARGIN, axis=56)


def ranks_figure(study: ExpertsStudy) -> go.Figure | str:
    """A decode step of each rank: the time in its experts, in the sums with the other ranks, and in all else.

    Markdown text where there were no ranks.
    """
    if not study.ranks:
        return "The experts were not divided among ranks."
    steps = [rank.steps for rank in study.ranks]
    names = [f"rank {place}: experts {rank.first} to {rank.end - 1}" for place, rank in enumerate(study.ranks)]
    sums = "sums of the ranks, with the wait for others"
    parts = {
        "experts": ([step.experts_ms for step in steps], SIDE_COLORS["candidate"]),
        sums: ([step.sums_ms for step in steps], STAGE_COLORS[Stage.ALL_REDUCE]),
        "all else": ([step.step_ms - step.experts_ms - step.sums_ms for step in steps], SIDE_COLORS["baseline"]),
    }
    texts = [f"&nbsp;reads {step.read:.1f}" for step in steps]
    figure, left = _steps_in_parts(names, parts, [step.step_ms for step in steps], texts)
    words = (
        f"a decode step of {steps[0].batch} sequences; reads: experts of a layer on average; one thread for each rank"
    )
    finish(figure, "Who waits for whose experts", in_lines(_subtitle(study), words), 100 + 40 * len(steps), left=left)
    return legend_below(figure, list(parts), left, axis=40)


def experts_in_memory_figure(study: ExpertsStudy) -> go.Figure | str:
    """A decode step by the part of the experts in memory: the time in which it waits for the disk, and all else.

    Markdown text where no experts were on the disk.
    """
    if not (points := study.on_disk):
        return "All experts were in memory."
    names = [f"{point.experts / point.of:.0%} in memory" for point in points]
    parts = {
        "waiting for experts": ([point.wait_ms for point in points], STAGE_COLORS[Stage.FETCH]),
        "all else": ([point.step_ms - point.wait_ms for point in points], SIDE_COLORS["candidate"]),
    }
    texts = [f"&nbsp;{point.reads.hit_rate:.0%} hits, {number(point.read_mb, 2)} MB read" for point in points]
    figure, left = _steps_in_parts(names, parts, [max(point.step_ms, point.least_ms) for point in points], texts)
    least = f"the disk's time for what was read, at {points[0].disk_gb_s:.2g} GB/s"
    figure.add_scatter(x=[point.least_ms for point in points], y=names, mode="markers", name=least,
                       marker={"symbol": "line-ns-open", "size": 22, "color": LIMIT, "line_width": 3},
                       hovertemplate="%{y}<br>" + least + ": %{x:.3g} ms<extra></extra>")  # fmt: skip
    right = " to ".join(dict.fromkeys(f"{share:.0%}" for share in study.right_guesses))
    guessed = f"; {right} of the guesses were right" if right else ""
    disk = f"a decode step of one sequence; hits: chosen experts that were in memory{guessed}"
    finish(figure, "Experts on the disk", in_lines(_subtitle(study), disk), 100 + 44 * len(points), left=left)
    return legend_below(figure, [*parts, least], left, axis=40)


def _steps_in_parts(
    names: list[str], parts: Mapping[str, tuple[list[float], str]], ends: list[float], texts: list[str]
) -> tuple[go.Figure, int]:
    """A bar of milliseconds for each name, in parts with their colors, and a text after its end; and the pixels left of
    the bars.
    """
    figure, left = go.Figure(), left_of(names)
    for name, (milliseconds, color) in parts.items():
        figure.add_bar(x=milliseconds, y=names, orientation="h", name=name, marker_color=color, width=0.6,
                       hovertemplate="%{y}<br>" + name + ": %{x:.3g} ms<extra></extra>")  # fmt: skip
    figure.add_scatter(x=ends, y=names, mode="text", text=texts, textposition="middle right", cliponaxis=False,
                       hoverinfo="skip", showlegend=False)  # fmt: skip
    figure.update_xaxes(ticksuffix=" ms", range=[0, bars_end(ends, texts, left)], nticks=6)
    figure.update_yaxes(autorange="reversed", showgrid=False)
    return figure.update_layout(barmode="stack"), left


def choice_figure(study: ExpertsStudy) -> go.Figure:
    """The ratios of both pairs with their intervals above; below, the speedups that the paper reports."""
    ours = {_name(pair): pair.gain for pair in (study.routing, study.sparse)}
    theirs = _published()
    figure = panels([90, 40 * len(theirs) + 20], 90)
    left = left_of([*ours, *theirs["label"]])
    add_measured(figure, ours, [f"<b>{ratio}</b>" for ratio in ours.values()], left, "times faster")
    texts = [f"<b>{value:.3g}x</b>{more}" for value, more in zip(theirs["speedup"], theirs["more"], strict=True)]
    add_published(figure, list(theirs["label"]), theirs["speedup"], theirs["source"], texts, left, row=2)
    rows = f"a table against one-hot products: {study.routed_rows} rows to their experts and back, in plain torch"
    bytes_ = "experts against a dense MLP: one row, the same bytes, not the same numbers"
    text = in_lines(_subtitle(study), rows, bytes_, *source_lines(theirs["source"]), OWN_SCALES)
    return finish(figure, "What choosing costs", text, height=260 + 40 * len(theirs), left=left)


def _published() -> pd.DataFrame:
    """The paper's factor of its kernels, and the speedups of whole models from its latencies."""
    kernels = published("moe-kernels")
    kernels = kernels.assign(label="kernels around experts", speedup=kernels["value"], more=", stated as over 6x")
    latencies = published("sc22-moe")
    slow, fast = (latencies[latencies["method"] == method] for method in ("pytorch", "ds-moe"))
    models = slow.merge(fast, on=["model", "hardware", "source"], suffixes=("_slow", "_fast"))
    models["speedup"] = models["value_slow"] / models["value_fast"]
    models["label"] = models["model"] + "<br>" + models["hardware"]
    pairs = zip(models["value_slow"], models["value_fast"], strict=True)
    models["more"] = [f", {number(slow, 4)} to {number(fast, 4)} ms" for slow, fast in pairs]
    return pd.concat([kernels, models])[["label", "speedup", "more", "source"]]


def _name(pair: TimedPair) -> str:
    slow, fast = pair.judged
    return f"{fast}<br>against {slow}"


def _axes(figure: go.Figure, rows: str) -> None:
    figure.update_xaxes(title="expert", showgrid=False)
    figure.update_yaxes(title=rows, autorange="reversed", showgrid=False, tickformat="d")


def _height(rows: int) -> int:
    return min(max(CELL * rows, LEAST), MOST)


def _subtitle(study: ExpertsStudy) -> str:
    of = study.of
    router = f"router skewed by {of.skew:g}" if of.skew else "router as it is"
    return in_lines(
        f"{of.model} ({of.origin}), {of.dtype}, {router}",
        f"{of.prompt_tokens} + {of.new_tokens} tokens, {of.threads} threads, {study.environment.machine}",
    )
