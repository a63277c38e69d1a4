"""Figures of latencies: the distributions of both sides, and the time per token against the physical limit."""

from __future__ import annotations

from typing import TYPE_CHECKING

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from labkit.figures.room import left_of
from labkit.figures.summary import machine_line, subtitle_of
from labkit.figures.theme import LIMIT, SIDE_COLORS, SOFT, finish, heading, in_lines, range_whiskers, write_after
from labkit.studies.comparison_words import speedup_line
from labkit.studies.frames import limit, names, number, sides

if TYPE_CHECKING:
    from labkit.harness import Comparison, Measurement

PANELS = {"ttft": "First token (TTFT)", "per_token": "Every further token", "end_to_end": "Whole call"}


def latency_figure(comparison: Comparison) -> go.Figure:
    """Every raw sample of both sides in milliseconds, with its box, one panel per metric; axes start at zero."""
    figure = make_subplots(rows=len(PANELS), cols=1, vertical_spacing=0.16)
    left = left_of(list(names(comparison).values()))
    for row, (metric, panel) in enumerate(PANELS.items(), start=1):
        for role, side in sides(comparison).items():
            name, samples = names(comparison)[role], side.samples_ms[metric]
            figure.add_box(
                x=samples,
                y=[name] * len(samples),
                orientation="h",
                name=name,
                boxpoints="all",
                jitter=0.8,
                pointpos=0,
                marker={"size": 4, "opacity": 0.45, "color": SIDE_COLORS[role]},
                fillcolor="rgba(0,0,0,0)",
                line={"width": 1.6},
                hovertemplate="%{x:.2f} ms<extra>" + name + "</extra>",
                row=row,
                col=1,
            )
        slowest = [max(side.samples_ms[metric]) for side in sides(comparison).values()]
        texts = [_distribution(side, metric) for side in sides(comparison).values()]
        labels = list(names(comparison).values())
        write_after(figure, texts, slowest, labels, left, unit=" ms", log=False, row=row, size=13, color=SOFT)
        figure.add_annotation(heading(panel, left=left), row=row, col=1)
    figure.update_xaxes(nticks=6)
    figure.update_yaxes(autorange="reversed")
    return finish(figure, "Latency of every run and every token", subtitle_of(comparison), height=560, left=left)


def per_token_figure(comparison: Comparison) -> go.Figure:
    """Median ms/token of both sides, the range over rounds as whiskers, and the floor that memory sets as a line."""
    figure = go.Figure()
    labels, units = list(names(comparison).values()), f"{comparison.unit}s"
    left, ends, texts = left_of(labels), [], []
    for role, side in sides(comparison).items():
        name, value, rounds = names(comparison)[role], side.per_token_ms, side.rounds_ms("per_token")
        figure.add_bar(
            x=[value],
            y=[name],
            orientation="h",
            name=name,
            marker_color=SIDE_COLORS[role],
            width=0.56,
            error_x=range_whiskers([value], [rounds]),
            hovertemplate=f"{name} %{{x:.2f}} ms/token<br>{units} {min(rounds):.2f} – {max(rounds):.2f}<extra></extra>",
        )
        ends.append(max(rounds))
        texts.append(f"<b>{number(value)} ms/token</b><br>{_share(side)}")
    write_after(figure, texts, ends, labels, left, unit=" ms", log=False)
    figure.update_xaxes(nticks=8, title=f"median step; whiskers: all {units}")
    figure.update_yaxes(autorange="reversed")
    _add_floor(figure, comparison, left)
    subtitle = in_lines(subtitle_of(comparison), machine_line(comparison))
    return finish(figure, speedup_line(comparison), subtitle, height=270, left=left)


def _add_floor(figure: go.Figure, comparison: Comparison, left: int) -> None:
    """Draws the least time of a decode step: every weight read once at the bandwidth probed between the runs."""
    memory_limit = limit(comparison)
    if memory_limit is None:
        counted = comparison.candidate.work is not None
        why = "no bandwidth was probed" if counted else "what a step of this model reads is not known"
        figure.add_annotation(heading(f"limit unknown: {why}", LIMIT, left))
        return
    figure.add_vline(x=memory_limit.floor_ms, line={"color": LIMIT, "width": 2, "dash": "dash"}, name="floor")
    reading = f"{number(memory_limit.megabytes)} MB read at {memory_limit.bandwidth_gb_s:.1f} GB/s"
    text = f"dashed: {number(memory_limit.floor_ms)} ms, {reading}"
    figure.add_annotation(heading(text, LIMIT, left))


def _distribution(side: Measurement, metric: str) -> str:
    samples, summary = side.samples_ms[metric], side.summary(metric)
    tail = (
        f"P95 {number(summary.p95)}" if summary.enough_for_p95 else f"{number(min(samples))} to {number(max(samples))}"
    )
    return f"median <b>{number(summary.median)}</b> ms<br>{tail}, n = {summary.n:,}"


def _share(side: Measurement) -> str:
    share = side.floor_share
    return "share of the limit unknown" if share is None else f"{share:.0%} of the limit"
