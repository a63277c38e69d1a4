"""Figures of streaming: tokens per second by batch with the limits of disk and processor, and memory over time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import plotly.graph_objects as go

from labkit.figures.room import STEPS, legend_below
from labkit.figures.theme import LIMIT, SIDE_COLORS, SOFT, finish, in_lines, mark_line, whiskers
from labkit.studies.frames import number

if TYPE_CHECKING:
    from labkit.harness.streaming.plan import StreamingPlan
    from labkit.harness.streaming.records import MemorySample
    from labkit.studies.larger_than_memory import StreamingStudy

READING, COMPUTING, WAITING = "#d9702b", "#2f6db5", "#8d939b"
MARGIN = 70  # pixels left of an axis of numbers
POINTS = 60  # of a line
MEASURED, DISK_LINE, COMPUTE_LINE = "measured", "the disk's line, predicted", "computing, predicted"
BUDGET, COUNTED, HELD = "memory budget", "counted before loading", "held by the engine's process"


def batch_figure(study: StreamingStudy) -> go.Figure:
    """Tokens per second by batch: measured, and as disk and processor allow.

    One line marks the batch from which computing takes as long as the disk, another the largest batch that fits.
    """
    plan, points = study.plan, study.points
    end = max(2 * plan.largest_batch, round(1.6 * (plan.free_batch or 1)), 2 * points[-1].batch)
    steps = [plan.step(batch) for batch in grid(end)]
    figure = go.Figure()
    for name, color, took in (
        (DISK_LINE, READING, [step.disk_ms for step in steps]),
        (COMPUTE_LINE, COMPUTING, [step.compute_ms for step in steps]),
    ):
        figure.add_scatter(
            x=[step.batch for step in steps], mode="lines", name=name,
            line={"color": color, "width": 2, "dash": "dash"},
            y=[step.batch * 1e3 / ms if ms else None for step, ms in zip(steps, took, strict=True)],
            hovertemplate="batch %{x}: at most %{y:.3g} tokens/s<extra>" + name + "</extra>",
        )  # fmt: skip
    rates = [point.tokens_per_s for point in points]
    slowest = [point.batch * 1e3 / max(point.decode_ms) for point in points]
    fastest = [point.batch * 1e3 / min(point.decode_ms) for point in points]
    figure.add_scatter(
        x=[point.batch for point in points], y=rates, mode="lines+markers", name=MEASURED,
        line={"color": SIDE_COLORS["candidate"], "width": 2.4}, marker={"size": 10},
        error_y=whiskers(rates, slowest, fastest),
        hovertemplate="batch %{x}: %{y:.3g} tokens/s<extra>" + MEASURED + "</extra>",
    )  # fmt: skip
    mark_line(figure, plan.largest_batch, f"largest that fits: {plan.largest_batch:,}", SOFT, 0.02, end)
    if plan.free_batch is not None:
        mark_line(figure, plan.free_batch, f"r*: free from {plan.free_batch:,} on", LIMIT, 0.09, end)
    ticks = [batch for batch in [step * 10**power for power in range(7) for step in STEPS] if batch <= end]
    figure.update_xaxes(
        type="log", title="sequences in a batch", tickvals=ticks, ticktext=[f"{tick:,}" for tick in ticks]
    )
    figure.update_yaxes(type="log", title="tokens per second, all sequences", tickformat="~s", dtick=1)
    title = "What batch pays: tokens per second, all sequences"
    note = f"free: computing takes as long as the disk, so that streaming costs nothing. {_rates(plan)}"
    finish(figure, title, in_lines(subtitle(study), note, study.plan.trust.short), height=420)
    return legend_below(figure, [MEASURED, DISK_LINE, COMPUTE_LINE], MARGIN, axis=60)


def memory_figure(study: StreamingStudy) -> go.Figure:
    """The memory of the engine's process over time, with the budget and the count for each batch."""
    plan, samples = study.plan, study.memory
    figure = go.Figure()
    figure.add_scatter(
        x=[sample.second for sample in samples], y=[sample.bytes / 1e6 for sample in samples], mode="lines", name=HELD,
        line={"color": SIDE_COLORS["candidate"], "width": 1.8}, fill="tozeroy",
        hovertemplate="%{x:.1f} s: %{y:.4g} MB<extra>" + HELD + "</extra>",
    )  # fmt: skip
    starts = _batch_starts(samples)
    ends = [*list(starts.values())[1:], samples[-1].second]
    counted = [plan.step(batch).memory_bytes / 1e6 for batch in starts]
    x = [edge for begin, end in zip(starts.values(), ends, strict=True) for edge in (begin, end)]
    figure.add_scatter(
        x=x, y=[megabytes for megabytes in counted for _ in range(2)], mode="lines", name=COUNTED,
        line={"color": SOFT, "width": 1.6, "dash": "dot"},
        hovertemplate="%{y:.4g} MB<extra>" + COUNTED + "</extra>",
    )  # fmt: skip
    figure.add_scatter(
        x=[0, samples[-1].second], y=[plan.memory / 1e6] * 2, mode="lines", name=BUDGET,
        line={"color": LIMIT, "width": 2}, hovertemplate="%{y:.4g} MB<extra>" + BUDGET + "</extra>",
    )  # fmt: skip
    for batch, begin in starts.items():
        figure.add_annotation(text=f"batch {batch:,}", x=begin, y=0, yanchor="bottom", xanchor="left", xshift=2,
                              yshift=4, showarrow=False, font={"size": 12}, textangle=-90)  # fmt: skip
    most = max(point.peak_bytes for point in study.points)
    figure.update_xaxes(title="seconds", range=[0, samples[-1].second])
    figure.update_yaxes(ticksuffix=" MB", rangemode="tozero")
    weights = plan.footprint.weights
    title = f"{number(weights / 1e6)} MB of weights in {number(plan.memory / 1e6)} MB: {number(most / 1e6)} MB at most"
    note = (
        "without the memory of imports, sampled every 50 ms; counted: weights in memory, slots, caches, workspace, and "
        "128 MiB for the rest of the process"
    )
    finish(figure, title, in_lines(subtitle(study), note), height=340)
    return legend_below(figure, [HELD, COUNTED, BUDGET], MARGIN + 10, axis=60)


def subtitle(study: StreamingStudy) -> str:
    """The case that was measured, and the machine."""
    case = study.plan.case
    return in_lines(
        f"{case.title} ({case.origin})",
        f"{number(study.plan.footprint.weights / 1e9)} GB of weights; {study.plan.environment.machine}",
    )


def grid(end: int) -> list[int]:
    """Batches from 1 to `end`, evenly spread on a logarithmic axis."""
    return sorted({round(end ** (place / POINTS)) for place in range(POINTS + 1)})


def _rates(plan: StreamingPlan) -> str:
    return f"D = {number(plan.rates.disk_gb_s)} GB/s, F = {number(plan.rates.gflop_s)} GFLOP/s"


def _batch_starts(samples: tuple[MemorySample, ...]) -> dict[int, float]:
    """The second at which each batch began."""
    starts: dict[int, float] = {}
    for sample in samples:
        starts.setdefault(sample.batch, sample.second)
    return starts
