"""Figures of a pipeline: bubbles and their formulas, throughput by micro-batches, and tensor parallelism."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import plotly.graph_objects as go

from labkit.figures.pipeline_timeline import pipeline_subtitle
from labkit.figures.published_panels import MEASURED_HERE, OWN_SCALES, add_published, source_lines
from labkit.figures.room import left_of, legend_below, shares_axis
from labkit.figures.theme import (
    INK,
    LIMIT,
    SIDE_COLORS,
    finish,
    heading,
    in_lines,
    mark_line,
    panels,
    range_whiskers,
    write_after,
)
from labkit.published import published
from labkit.studies.frames import number

if TYPE_CHECKING:
    from labkit.studies.pipeline import PipelineStudy

MARGIN = 70
TABLE = "sc22-pipeline-530b"
FORMULA, UNEQUAL = "formula, equal stages", "ideal run with the measured stage times"
SCHEDULE_COLORS = {"queue": SIDE_COLORS["candidate"], "rounds": "#2f8f5b", "barrier": "#d9702b", "naive": "#8d939b"}
WAY_COLORS = {"queue": SIDE_COLORS["candidate"], "naive": "#8d939b", "tensor parallel": "#8159a8"}
WAY_NAMES = {
    "queue": "pipeline, queue", "naive": "pipeline, one batch at a time", "tensor parallel": "tensor parallelism"
}  # fmt: skip


def bubble_figure(study: PipelineStudy) -> go.Figure:
    """The bubble of each run after the prompt: measured, by its schedule's formula, and in the ideal run.

    The ideal run has the measured times of the stages.
    """
    runs, spread = study.measured.runs, study.measured.bubbles
    names = [run.name for run in runs]
    figure = go.Figure()
    figure.add_bar(
        x=[run.bubble for run in runs], y=names, orientation="h", name=MEASURED_HERE, width=0.6,
        marker_color=[SCHEDULE_COLORS[run.schedule] for run in runs], showlegend=False,
        error_x=range_whiskers([run.bubble for run in runs], spread),
        hovertemplate="%{y}: %{x:.1%}<extra>" + MEASURED_HERE + "</extra>",
    )  # fmt: skip
    markers = {
        FORMULA: (
            [run.formula for run in runs],
            {"symbol": "line-ns", "size": 22, "line": {"width": 3, "color": LIMIT}},
        ),
        UNEQUAL: ([study.unequal(run) for run in runs], {"symbol": "diamond-open", "size": 10, "color": INK}),
    }
    for name, (x, marker) in markers.items():
        figure.add_scatter(x=x, y=names, mode="markers", name=name, marker=marker,
                           hovertemplate="%{y}: %{x:.1%}<extra>" + name + "</extra>")  # fmt: skip
    most = max(max(run.formula, *rounds) for run, rounds in zip(runs, spread, strict=True))
    for run, rounds in zip(runs, spread, strict=True):
        end = max(run.formula, study.unequal(run), *rounds)
        figure.add_annotation(text=f"{run.points_over:+.1f} points", x=end, y=run.name, xanchor="left",
                              xshift=12, showarrow=False)  # fmt: skip
    left = left_of(names)
    figure.update_yaxes(autorange="reversed")
    figure.update_xaxes(**shares_axis(1.45 * most), title="of the stages' time, after the prompt")
    far = study.farthest
    title = f"Bubbles against their formulas: {far.name} differs most, by {abs(far.points_over):.1f} points"
    explained = (
        "bars: measured, with the range over all rounds; the diamond minus the line is the cost of unequal stages, as "
        "all wait for the slowest. Stages that worked before the last prompt was through save a little"
    )
    finish(figure, title, in_lines(pipeline_subtitle(study), explained), height=44 * len(runs) + 100)
    return legend_below(figure, [FORMULA, UNEQUAL], left, axis=60)


def micro_batch_figure(study: PipelineStudy) -> go.Figure | str:
    """Tokens per second by number of micro-batches of one batch: measured, and by formula with t(r) = max(w, c r).

    Markdown text where only naive was measured.
    """
    law, case = study.law, study.measured.case
    if law is None:
        return "Only the schedule naive was measured, which has one micro-batch."
    figure, drawn = go.Figure(), []
    runs = study.measured.runs
    end = max(run.micro_batches for run in runs)
    parts = sorted({min(case.batch, round((2 * end) ** (place / 40))) for place in range(41)})
    tokens = runs[0].tokens
    for schedule in dict.fromkeys(run.schedule for run in runs):
        color, own = SCHEDULE_COLORS[schedule], [run for run in runs if run.schedule == schedule]
        if schedule != "naive":
            figure.add_scatter(
                x=parts, y=[law.tokens_per_s(schedule, case.stages, case.batch, count, tokens) for count in parts],
                mode="lines", name=f"{schedule}, by formula", line={"color": color, "width": 1.8, "dash": "dash"},
                showlegend=False, hovertemplate="m = %{x}: %{y:.3g} tokens/s<extra>by formula</extra>",
            )  # fmt: skip
        drawn.append(schedule)
        figure.add_scatter(
            x=[run.micro_batches for run in own], y=[run.tokens_per_s for run in own], mode="markers", name=schedule,
            marker={"size": 11, "color": color, "symbol": "square" if schedule == "naive" else "circle"},
            hovertemplate="m = %{x}: %{y:.3g} tokens/s<extra>" + schedule + ", measured</extra>",
        )  # fmt: skip
    law_text = (
        f"t(r) = max({number(law.weights_ms)} ms, {number(law.ms_per_row)} ms a row), from the measured steps; "
        "dashed: the formulas with it, points measured"
    )
    if (turning := study.most_parts) is None:
        law_text += ". No step was so small that reading weights was the limit"
    else:
        words = f"{law.turning_rows:.1f} rows:<br>right of it reading<br>weights is the limit"
        mark_line(figure, turning, words, LIMIT, 0.02)
    ticks = [2**power for power in range(12) if 2**power <= 2 * end]
    figure.update_xaxes(type="log", title="micro-batches of one batch", tickvals=ticks, ticktext=list(map(str, ticks)),
                        range=[-0.08, math.log10(parts[-1]) + 0.08])  # fmt: skip
    figure.update_yaxes(title="tokens per second, all rows", rangemode="tozero", tickformat="~s")
    finish(figure, "What micro-batches pay", in_lines(pipeline_subtitle(study), law_text), height=400)
    return legend_below(figure, drawn, MARGIN, axis=60)


def ways_figure(study: PipelineStudy) -> go.Figure | str:
    """Tokens per second by batch, of the pipeline and of tensor parallelism on the same number of ranks.

    Markdown text where they were not compared.
    """
    ways, case = study.measured.ways, study.measured.case
    if not ways:
        return "Nothing was compared with tensor parallelism."
    figure, drawn = go.Figure(), []
    for way, name in WAY_NAMES.items():
        points = sorted((point for point in ways if point.way == way), key=lambda point: point.batch)
        if not points:
            continue
        drawn.append(name)
        rates = [point.tokens_per_s for point in points]
        figure.add_scatter(
            x=[point.batch for point in points], y=rates, mode="lines+markers",
            name=name, line={"color": WAY_COLORS[way], "width": 2.2}, marker={"size": 10},
            error_y=range_whiskers(rates, [point.runs for point in points]),
            hovertemplate="batch %{x}: %{y:.3g} tokens/s<extra>" + name + "</extra>",
        )  # fmt: skip
    batches = sorted({point.batch for point in ways})
    figure.update_xaxes(
        type="log", title="rows of the batch", tickvals=batches, ticktext=[str(batch) for batch in batches]
    )
    figure.update_yaxes(type="log", title="tokens per second, all rows", tickformat="~s", dtick="D2")
    ratios = study.against_tensor_parallel()
    compared = ", ".join(f"batch {batch}: {ratio:.2f}x" for batch, ratio in sorted(ratios.items()))
    ratio_text = f"the queue against tensor parallelism: {compared}" if compared else study.measured.left_out
    reason = (
        f"these ranks share one memory: with {case.stages} micro-batches every weight is read {case.stages} times for "
        "a token, with tensor parallelism once, but its ranks exchange twice in every layer"
    )
    subtitle = in_lines(pipeline_subtitle(study), ratio_text, reason)
    finish(figure, "The pipeline and tensor parallelism", subtitle, height=380)
    return legend_below(figure, drawn, MARGIN, axis=60)


def pipeline_gains_figure(study: PipelineStudy) -> go.Figure:
    """Tokens per second of each run over naive's above; below, the gains that the slides of the SC22 paper report.

    The paper adds one optimisation after another.
    """
    gains, theirs = study.gains, published(TABLE)
    names, labels = list(gains), list(theirs["method"])
    heights = [24 * len(names) + 20, 30 * len(labels) + 20]
    figure = panels(heights, 80)
    left = left_of([*names, *labels])
    colors = [SCHEDULE_COLORS[run.schedule] for run in study.measured.runs]
    figure.add_bar(x=list(gains.values()), y=names, orientation="h", name=MEASURED_HERE, marker_color=colors,
                   hovertemplate="%{y}: %{x:.2f}x<extra>" + MEASURED_HERE + "</extra>", row=1, col=1)  # fmt: skip
    write_after(figure, [f"<b>{gain:.2f}x</b>" for gain in gains.values()], list(gains.values()), names, left, row=1)
    texts = [f"<b>{value:.2f}x</b>" for value in theirs["value"]]
    add_published(figure, labels, theirs["value"], theirs["source"], texts, left, row=2)
    base = "naive" if "naive" in gains else names[0]
    figure.add_annotation(heading(f"<b>{MEASURED_HERE}</b>: tokens per second over {base}", left=left), row=1, col=1)
    figure.update_yaxes(autorange="reversed")
    paper = theirs.iloc[0]
    hardware = f"{paper['model']} on {paper['hardware']}, each bar adds to the bars above it: {paper['note']}"
    baselines = "the paper's baseline is many micro-batches with a barrier after each token, ours above is naive"
    text = in_lines(pipeline_subtitle(study), *source_lines(theirs["source"]), hardware, baselines, OWN_SCALES)
    return finish(figure, "Times the tokens: ours, and the paper's", text, sum(heights) + 190, left=left)
