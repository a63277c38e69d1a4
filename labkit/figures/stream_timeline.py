"""The timeline of a stream: which layer each slot held at which time, and which layer was computed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import plotly.graph_objects as go

from labkit.figures.room import legend_below
from labkit.figures.streaming import COMPUTING, READING, WAITING, subtitle
from labkit.figures.theme import SOFT, finish, heading, in_lines, panels
from labkit.studies.frames import number

if TYPE_CHECKING:
    from labkit.harness.streaming.records import LayerSpan
    from labkit.studies.larger_than_memory import StreamingStudy

MARGIN = 130
LANE, BETWEEN = 32, 96  # pixels: of a lane, and from one panel to the next
IN_MEMORY, WAIT_LANE = "layers in memory", "waiting"
NAMES = {"read": "read from the disk", "compute": "computed", "wait": "computing waits for the layer"}
COLORS = {"read": READING, "compute": COMPUTING, "wait": WAITING}
SHOWN_STEPS = 2


def stream_timeline_figure(study: StreamingStudy) -> go.Figure | str:
    """When each layer was read into a slot, waited for and computed: in a prompt, and below it in the next two steps.

    Markdown text where nothing was streamed.
    """
    point = study.shown
    if not point.spans:
        return "All layers fit into memory at this batch: nothing was read."
    starts = _pass_starts(point.spans)
    ends = [*list(starts.values())[1:], max(span.end_ms for span in point.spans)]
    steps = min(SHOWN_STEPS, len(starts) - 1)
    slots = sorted({span.slot for span in point.spans if span.slot is not None})
    lanes = [WAIT_LANE, *([IN_MEMORY] if point.resident_layers else []), *(f"slot {slot}" for slot in slots)]
    panel = LANE * len(lanes)
    figure = panels([panel, panel], BETWEEN)
    for row, (begin, end) in enumerate(((starts[0], ends[0]), (starts[1], ends[steps])), start=1):
        _panel(figure, [span for span in point.spans if begin < span.end_ms and span.begin_ms < end], begin, row)
        figure.update_xaxes(range=[0, end - begin], ticksuffix=" ms", nticks=7, row=row, col=1)
    for step in range(2, steps + 1):
        figure.add_vline(x=starts[step] - starts[1], line={"color": SOFT, "width": 1, "dash": "dot"}, row=2, col=1)
    figure.update_yaxes(categoryorder="array", categoryarray=lanes[::-1], range=[-0.5, len(lanes) - 0.5])
    figure.update_layout(barmode="overlay")
    rows = point.batch * study.plan.case.prompt_tokens
    figure.add_annotation(heading(f"<b>the prompt</b>: {rows:,} rows through each layer", left=MARGIN), row=1, col=1)
    steps_title = f"<b>the next {steps} steps</b>: {point.batch:,} rows through each layer"
    figure.add_annotation(heading(steps_title, left=MARGIN), row=2, col=1)
    figure.update_xaxes(title="from their beginning", row=2, col=1)
    title = "Layer by layer, slot by slot: the disk reads while the processor computes"
    finish(figure, title, in_lines(subtitle(study), *_stream_lines(study)), height=2 * panel + BETWEEN + 80)
    return legend_below(figure, list(NAMES.values()), MARGIN, axis=60)


def _panel(figure: go.Figure, spans: Sequence[LayerSpan], begin: float, row: int) -> None:
    for kind, name in NAMES.items():
        drawn = [span for span in spans if span.kind == kind]
        figure.add_bar(
            base=[max(0.0, span.begin_ms - begin) for span in drawn], y=[_lane(span) for span in drawn], name=name,
            x=[span.end_ms - max(begin, span.begin_ms) for span in drawn], orientation="h", width=0.62,
            marker={"color": COLORS[kind], "line": {"width": 0}}, showlegend=row == 1, legendgroup=kind,
            hovertext=[f"layer {span.layer}, {_step(span.step)}" for span in drawn],
            hovertemplate="%{y}: %{hovertext}<br>%{x:.3g} ms, " + name + "<extra></extra>", row=row, col=1,
        )  # fmt: skip


def _stream_lines(study: StreamingStudy) -> list[str]:
    point, plan = study.shown, study.plan
    batch_line = (
        f"batch {point.batch:,}: {point.resident_layers} of {plan.footprint.layers} layers stay in memory, the others "
        f"pass through {plan.case.slots} slots, {number(point.streamed_bytes / 1e6)} MB a step"
    )
    return [batch_line, study.hidden_sentence]


def _lane(span: LayerSpan) -> str:
    if span.kind == "wait":
        return WAIT_LANE
    return IN_MEMORY if span.slot is None else f"slot {span.slot}"


def _step(step: int) -> str:
    return "prompt" if step == 0 else f"step {step}"


def _pass_starts(spans: Sequence[LayerSpan]) -> dict[int, float]:
    """When each pass through the layers began."""
    starts: dict[int, float] = {}
    for span in sorted(spans, key=lambda span: span.begin_ms):
        if span.kind != "read":
            starts.setdefault(span.step, span.begin_ms)
    return starts
