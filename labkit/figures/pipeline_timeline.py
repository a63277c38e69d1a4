"""Gantt charts of a pipeline's schedules: what each stage did at which time, and the ideal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from labkit.figures.parallel import RANK_COLORS
from labkit.figures.room import legend_below
from labkit.figures.theme import INK, STAGE_COLORS, finish, heading, in_lines
from labkit.stages import Phase, Stage

if TYPE_CHECKING:
    from labkit.harness.pipeline.records import ScheduleRun, StageSpan
    from labkit.studies.pipeline import PipelineStudy

MARGIN = 84
LANE, BETWEEN = 26, 58  # pixels: of a lane, and from one panel to the next
SHOWN_TOKENS = 4  # in view at first
MOST_SPANS = 1500  # drawn of a schedule
NAMES = {
    "compute": "layers, a colour for each micro-batch",
    "sample": "choosing tokens",
    "wait": "waiting for rows or tokens",
    "send": "sending",
}
IDEAL_NAME, PROMPT_NAME = "ideal, simulated", "hatched: of a prompt"
COLORS = {"sample": STAGE_COLORS[Stage.SAMPLE], "wait": STAGE_COLORS[Stage.RECV], "send": STAGE_COLORS[Stage.SEND]}
WIDTHS = {"compute": 0.7, "sample": 0.7, "wait": 0.22, "send": 0.9}


def pipeline_timeline_figure(study: PipelineStudy) -> go.Figure:
    """Each schedule after the prompt: the measured run of each stage, and below it the ideal run.

    The ideal run has the measured times of the stages. Time 0 is the end of all prompts. The first tokens are in view;
    zooming out shows more.
    """
    runs = study.shown
    stages = range(study.measured.case.stages)
    lanes = [name for stage in stages for name in (_lane(stage), _ideal_lane(stage))]
    figure = _panels([_title(run, run.bubble, run.formula) for run in runs], len(lanes))
    ends = []
    for row, run in enumerate(runs, start=1):
        shown = [span for span in run.spans if span.end_ms > run.prompt_ms][:MOST_SPANS]
        _measured(figure, shown, run.prompt_ms, row)
        last = max((span.step for span in shown), default=0)
        _ideal(figure, [span for span in study.ideal(run) if span.step <= last], row)
        first = [span.end_ms for span in shown if span.step <= SHOWN_TOKENS and span.kind == "compute"]
        ends.append(max(first, default=run.end_ms) - run.prompt_ms)
    figure.update_xaxes(range=[-0.02 * max(ends), 1.02 * max(ends)])
    title = "After the prompt: which stage works when"
    note = (
        f"the first {SHOWN_TOKENS} tokens of each row are in view: drag to zoom in, double click for all tokens. Below "
        "each stage is the ideal: its measured times, waiting only where the schedule requires it"
    )
    return _finished(figure, lanes, title, in_lines(pipeline_subtitle(study), note), [*NAMES.values(), IDEAL_NAME])


def prompt_timeline_figure(study: PipelineStudy) -> go.Figure:
    """Each schedule during the prompts, from the call to the end of all prompts."""
    runs = study.shown
    lanes = [_lane(stage) for stage in range(study.measured.case.stages)]
    figure = _panels([_title(run, run.prompt_bubble, run.prompt_formula) for run in runs], len(lanes))
    for row, run in enumerate(runs, start=1):
        _measured(figure, [span for span in run.spans if span.begin_ms < run.prompt_ms][:MOST_SPANS], 0.0, row)
        figure.add_vline(x=run.prompt_ms, line={"color": INK, "width": 1, "dash": "dot"}, row=row, col=1)
    figure.update_xaxes(range=[0, 1.02 * max(run.prompt_ms for run in runs)])
    pieces = max(run.prompt_pieces for run in runs)
    note = (
        f"hatched: prompts, which go through the stages in up to {pieces} pieces; the dotted line is the end of all "
        "prompts. A micro-batch with its first token continues meanwhile, if its schedule allows it"
    )
    return _finished(
        figure,
        lanes,
        "The prompt: which stage works when",
        in_lines(pipeline_subtitle(study), note),
        list(NAMES.values()),
    )


def _panels(titles: Sequence[str], lanes: int) -> go.Figure:
    share = BETWEEN / (len(titles) * LANE * lanes + (len(titles) - 1) * BETWEEN)
    figure = make_subplots(
        rows=len(titles), cols=1, shared_xaxes="all", vertical_spacing=share if len(titles) > 1 else 0
    )
    for row, title in enumerate(titles, start=1):
        figure.add_annotation(heading(title, left=MARGIN), row=row, col=1)
    return figure


def _measured(figure: go.Figure, spans: Sequence[StageSpan], begin: float, row: int) -> None:
    """Adds a trace of bars for each kind of span."""
    for kind, name in NAMES.items():
        shown = [span for span in spans if span.kind == kind]
        hatched = ["/" if span.phase is Phase.PREFILL and kind == "compute" else "" for span in shown]
        colors = (
            [RANK_COLORS[span.micro_batch % len(RANK_COLORS)] for span in shown] if kind == "compute" else COLORS[kind]
        )
        figure.add_bar(
            base=[round(span.begin_ms - begin, 3) for span in shown], x=[round(span.ms, 3) for span in shown],
            y=[_lane(span.stage) for span in shown], orientation="h", width=WIDTHS[kind], name=name,
            marker={"color": colors, "line": {"width": 0}, "pattern": {"shape": hatched, "size": 5, "solidity": 0.25}},
            legendgroup=kind, showlegend=row == 1, customdata=[_span_name(span) for span in shown],
            hovertemplate="%{y}: %{customdata}<br>%{x:.3g} ms, " + name.partition(",")[0] + "<extra></extra>",
            row=row, col=1,
        )  # fmt: skip


def _ideal(figure: go.Figure, spans: Sequence[StageSpan], row: int) -> None:
    figure.add_bar(
        base=[round(span.begin_ms, 3) for span in spans], x=[round(span.ms, 3) for span in spans],
        y=[_ideal_lane(span.stage) for span in spans], orientation="h", width=0.5, name=IDEAL_NAME, opacity=0.55,
        marker={
            "color": [RANK_COLORS[span.micro_batch % len(RANK_COLORS)] for span in spans],
            "line": {"width": 1, "color": "white"},
        },
        legendgroup="ideal", showlegend=row == 1, customdata=[_span_name(span) for span in spans],
        hovertemplate="%{customdata}<br>%{x:.3g} ms in the ideal<extra></extra>", row=row, col=1,
    )  # fmt: skip


def _finished(figure: go.Figure, lanes: list[str], title: str, subtitle: str, names: list[str]) -> go.Figure:
    rows = len({trace.yaxis for trace in figure.data})
    figure.update_yaxes(categoryorder="array", categoryarray=lanes[::-1], range=[-0.5, len(lanes) - 0.5])
    figure.update_layout(barmode="overlay", dragmode="zoom")
    figure.update_xaxes(ticksuffix=" ms", nticks=7)
    finish(figure, title, subtitle, height=rows * LANE * len(lanes) + (rows - 1) * BETWEEN + 80)
    return legend_below(figure, names, MARGIN, axis=44)


def pipeline_subtitle(study: PipelineStudy) -> str:
    """The case that was measured, and the machine."""
    case, layers = study.measured.case, study.measured.layers
    origin = f" ({case.origin})" if case.origin else ""
    stages = f"layers of the stages: {', '.join(map(str, layers))}; {study.measured.environment.machine}"
    return in_lines(f"{case.title}{origin}", stages, study.trust.short)


def _title(run: ScheduleRun, bubble: float, formula: float) -> str:
    rows = run.batch / run.micro_batches
    shares = f"bubble {_percent(bubble)}, formula {_percent(formula)}"
    return f"<b>{run.schedule}</b>, {run.micro_batches} x {rows:g} rows: {shares}"


def _span_name(span: StageSpan) -> str:
    return f"micro-batch {span.micro_batch}, " + ("prompt" if span.step == 0 else f"step {span.step}")


def _lane(stage: int) -> str:
    return f"stage {stage}"


def _ideal_lane(stage: int) -> str:
    return f"<i>ideal {stage}</i>"


def _percent(share: float) -> str:
    return f"{share:.0%}" if share >= 0.1 else f"{share:.1%}"
