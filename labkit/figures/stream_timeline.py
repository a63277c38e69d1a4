"""The timeline of a stream: what each slot held when, and what was computed meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from labkit.figures.frames import number
from labkit.figures.room import legend_below
from labkit.figures.streaming import COMPUTING, READING, WAITING, subtitle
from labkit.figures.theme import SOFT, finish, heading, in_lines

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
    """When each layer was read into which slot, waited for and computed: in a prompt above, in the two steps behind it
    below. Markdown text where nothing was streamed.
    """
    point = study.shown
    if not point.spans:
        return "All layers fit into memory at this batch: nothing was read."
    begun = _begun(point.spans)
    ends = [*list(begun.values())[1:], max(span.end_ms for span in point.spans)]
    steps = min(SHOWN_STEPS, len(begun) - 1)
    slots = sorted({span.slot for span in point.spans if span.slot is not None})
    lanes = [WAIT_LANE, *([IN_MEMORY] if point.resident_layers else []), *(f"slot {slot}" for slot in slots)]
    panel = LANE * len(lanes)
    figure = make_subplots(rows=2, cols=1, vertical_spacing=BETWEEN / (2 * panel + BETWEEN))
    for row, (begin, end) in enumerate(((begun[0], ends[0]), (begun[1], ends[steps])), start=1):
        _panel(figure, [span for span in point.spans if begin < span.end_ms and span.begin_ms < end], begin, row)
        figure.update_xaxes(range=[0, end - begin], ticksuffix=" ms", nticks=7, row=row, col=1)
    for step in range(2, steps + 1):
        figure.add_vline(x=begun[step] - begun[1], line={"color": SOFT, "width": 1, "dash": "dot"}, row=2, col=1)
    figure.update_yaxes(categoryorder="array", categoryarray=lanes[::-1], range=[-0.5, len(lanes) - 0.5])
    figure.update_layout(barmode="overlay")
    rows = point.batch * study.plan.case.prompt_tokens
    figure.add_annotation(heading(f"<b>the prompt</b>: {rows:,} rows through each layer", left=MARGIN), row=1, col=1)
    two = f"<b>the next {steps} steps</b>: {point.batch:,} rows through each layer"
    figure.add_annotation(heading(two, left=MARGIN), row=2, col=1)
    figure.update_xaxes(title="from their beginning", row=2, col=1)
    title = "Layer by layer, slot by slot: the disk reads while the processor computes"
    finish(figure, title, in_lines(subtitle(study), *_told(study)), height=2 * panel + BETWEEN + 80)
    return legend_below(figure, list(NAMES.values()), MARGIN, axis=60)


def _panel(figure: go.Figure, spans: Sequence[LayerSpan], begin: float, row: int) -> None:
    for kind, name in NAMES.items():
        mine = [span for span in spans if span.kind == kind]
        figure.add_bar(
            base=[max(0.0, span.begin_ms - begin) for span in mine], y=[_lane(span) for span in mine], name=name,
            x=[span.end_ms - max(begin, span.begin_ms) for span in mine], orientation="h", width=0.62,
            marker={"color": COLORS[kind], "line": {"width": 0}}, showlegend=row == 1, legendgroup=kind,
            hovertext=[f"layer {span.layer}, {_step(span.step)}" for span in mine],
            hovertemplate="%{y}: %{hovertext}<br>%{x:.3g} ms, " + name + "<extra></extra>", row=row, col=1,
        )  # fmt: skip


def _told(study: StreamingStudy) -> list[str]:
    point, plan = study.shown, study.plan
    told = (
        f"batch {point.batch:,}: {point.resident_layers} of {plan.footprint.layers} layers stay in memory, the others "
        f"pass through {plan.case.slots} slots, {number(point.streamed_bytes / 1e6)} MB a step"
    )
    hidden = "" if study.hidden is None else f"{study.hidden:.0%} of the shorter of reading and computing is hidden"
    return [told, hidden]


def _lane(span: LayerSpan) -> str:
    if span.kind == "wait":
        return WAIT_LANE
    return IN_MEMORY if span.slot is None else f"slot {span.slot}"


def _step(step: int) -> str:
    return "prompt" if step == 0 else f"step {step}"


def _begun(spans: Sequence[LayerSpan]) -> dict[int, float]:
    """When each pass through the layers began."""
    found: dict[int, float] = {}
    for span in sorted(spans, key=lambda each: each.begin_ms):
        if span.kind != "read":
            found.setdefault(span.step, span.begin_ms)
    return found
