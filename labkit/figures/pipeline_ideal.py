"""Ideal runs of a pipeline's schedules. Two sliders choose the stages and the number of micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from labkit.figures.parallel import RANK_COLORS
from labkit.figures.room import legend_below
from labkit.figures.theme import INK, finish, heading, in_lines, slider

if TYPE_CHECKING:
    from labkit.harness.pipeline.records import StageSpan
    from labkit.studies.pipeline import PipelineStudy

MARGIN = 74
SLIDERS, PANEL, BETWEEN = 170, 92, 48  # pixels: above the axes, of a panel, and between two
TOKENS = 3  # simulated for each row
MOST_PARTS = 8
DRAWN = ("naive", "barrier", "queue")
SCALE = [[place / 7, color] for place, color in enumerate(RANK_COLORS)]  # a colour for each micro-batch


class IdealVariant(NamedTuple):
    """A stop of the slider of stages.

    A micro-batch takes its share of the time of a compute-bound stage, and all of the time of any other.
    """

    shares: tuple[float, ...]  # of each stage, of a step of the whole batch
    compute_bound: bool


def ideal_figure(study: PipelineStudy) -> go.Figure:
    """Simulated runs of the schedules naive, barrier and queue.

    One slider chooses the stages and the law of their times, another the number of micro-batches of one batch; both
    work on a page without a notebook. The unit of time is a step of the whole batch in one process, so that panels can
    be compared.
    """
    variants = _variants(study)
    parts = min(study.measured.case.stages, MOST_PARTS)
    figure = make_subplots(rows=len(DRAWN), cols=1, shared_xaxes="all",
                           vertical_spacing=BETWEEN / (len(DRAWN) * PANEL + (len(DRAWN) - 1) * BETWEEN))  # fmt: skip
    for place, variant in enumerate(variants.values()):
        for row, schedule in enumerate(DRAWN, start=1):
            drawn = _bars(schedule, variant, parts)
            figure.add_bar(
                base=drawn["base"], x=drawn["x"], y=drawn["y"], orientation="h", width=0.78, visible=place == 0,
                marker={"color": drawn["marker.color"], "colorscale": SCALE, "cmin": 0, "cmax": 7,
                        "line": {"width": 1, "color": "white"}},
                customdata=drawn["customdata"], hovertemplate="%{y}: %{customdata}<br>%{x:.3g}<extra></extra>",
                row=row, col=1,
            )  # fmt: skip
            figure.add_scatter(x=[0], y=[-0.9], mode="text", text=drawn["text"], textposition="middle right",
                               hoverinfo="skip", textfont={"size": 13, "color": INK}, visible=place == 0,
                               cliponaxis=False, row=row, col=1)  # fmt: skip
    for row, schedule in enumerate(DRAWN, start=1):
        figure.add_annotation(heading(f"<b>{schedule}</b>", left=MARGIN), row=row, col=1)
    figure.update_yaxes(tickvals=list(range(8)), ticktext=[f"stage {stage}" for stage in range(8)], showgrid=False)
    figure.update_yaxes(range=_lanes(next(iter(variants.values()))))
    figure.update_xaxes(rangemode="tozero", showticklabels=False)
    figure.update_xaxes(showticklabels=True, title="steps of the whole batch in one process", row=len(DRAWN), col=1)
    note = (
        f"simulated, not measured: {TOKENS} tokens of each row of one batch; handing over rows costs nothing. "
        "Compute-bound: a micro-batch takes its share of a stage's time; bound by reading weights: all of it"
    )
    height = len(DRAWN) * PANEL + (len(DRAWN) - 1) * BETWEEN + SLIDERS + 60
    finish(figure, "The ideal: stages, their times, and micro-batches", in_lines(note), height=height, top=SLIDERS)
    sliders = [_stage_slider(variants), _part_slider(variants, parts)]
    return figure.update_layout(barmode="overlay", sliders=sliders, margin_l=MARGIN, margin_b=56)


def order_figure(spans: Sequence[StageSpan], title: str, subtitle: str) -> go.Figure:
    """A run as bars, with a lane for each stage."""
    stages = 1 + max(span.stage for span in spans)
    figure, names = go.Figure(), []
    for place in sorted({span.micro_batch for span in spans}):
        drawn = [span for span in spans if span.micro_batch == place]
        names.append(f"micro-batch {chr(ord('A') + place)}")
        figure.add_bar(
            base=[span.begin_ms for span in drawn], x=[span.ms for span in drawn], y=[span.stage for span in drawn],
            orientation="h", width=0.78, name=names[-1], text=[str(span.step) for span in drawn], textangle=0,
            insidetextanchor="middle", textfont={"color": "white"},
            marker={"color": RANK_COLORS[place % len(RANK_COLORS)], "line": {"width": 1, "color": "white"}},
            hovertemplate="%{base} to %{x}: token %{text} of " + names[-1] + "<extra></extra>",
        )  # fmt: skip
    ticks = {"tickvals": list(range(stages)), "ticktext": [f"stage {stage}" for stage in range(stages)]}
    figure.update_yaxes(range=[stages - 0.5, -0.5], showgrid=False, **ticks)
    figure.update_xaxes(title="stage times", rangemode="tozero")
    finish(figure, title, subtitle, height=36 * stages + 90).update_layout(barmode="overlay")
    return legend_below(figure, names, MARGIN)


def _variants(study: PipelineStudy) -> dict[str, IdealVariant]:
    """The variants by the label of the slider."""
    run = study.shown[-1]
    total = sum(run.step_ms)
    shares = tuple(ms / total for ms in run.step_ms)
    percent = " + ".join(f"{share:.0%}" for share in shares)
    variants = {f"{len(shares)} as measured ({percent}), compute-bound": IdealVariant(shares, True)}
    for stages in (2, 3, 4, 6):
        variants[f"{stages} equal ones, compute-bound"] = IdealVariant((1 / stages,) * stages, True)
        variants[f"{stages} equal ones, bound by reading weights"] = IdealVariant((1 / stages,) * stages, False)
    variants["4, the last takes twice as long, compute-bound"] = IdealVariant((0.2, 0.2, 0.2, 0.4), True)
    return variants


def _bars(schedule: str, variant: IdealVariant, parts: int) -> dict[str, list[Any]]:
    """The data of a panel's bars, and the text about its bubble."""
    from labkit.harness.pipeline.simulate import simulate, simulated_bubble

    count = 1 if schedule == "naive" else parts
    split = count if variant.compute_bound else 1
    spans = simulate(schedule, [share / split for share in variant.shares], TOKENS, count)
    end = max(span.end_ms for span in spans)
    return {
        "base": [round(span.begin_ms, 4) for span in spans],
        "x": [round(span.ms, 4) for span in spans],
        "y": [span.stage for span in spans],
        "marker.color": [span.micro_batch for span in spans],
        "customdata": [f"micro-batch {span.micro_batch}, token {span.step}" for span in spans],
        "text": [f"bubble {simulated_bubble(spans):.0%}, {TOKENS / end:.2f} x one process"],
    }


def _lanes(variant: IdealVariant) -> list[float]:
    """The range of the axis: stage 0 at the top, with room for words above it."""
    return [len(variant.shares) - 0.5, -1.4]


def _stage_slider(variants: dict[str, IdealVariant]) -> dict[str, Any]:
    """A slider whose stops show the traces of one variant each. The traces of all variants are on the page."""
    per = 2 * len(DRAWN)
    steps = []
    for place, (label, variant) in enumerate(variants.items()):
        visible = [index // per == place for index in range(per * len(variants))]
        axes: dict[str, Any] = {
            f"yaxis{row}".removesuffix("1") + ".range": _lanes(variant) for row in range(1, len(DRAWN) + 1)
        }
        zoomed = {f"xaxis{row}".removesuffix("1") + ".autorange": True for row in range(1, len(DRAWN) + 1)}
        steps.append({"method": "update", "label": label, "args": [{"visible": visible}, axes | zoomed]})
    return slider(steps, 0, "stages: ", pad_bottom=110)


def _part_slider(variants: dict[str, IdealVariant], active: int) -> dict[str, Any]:
    """A slider whose stops replace the bars of all variants."""
    steps = []
    for parts in range(1, MOST_PARTS + 1):
        drawn = [_bars(schedule, variant, parts) for variant in variants.values() for schedule in DRAWN]
        bars: dict[str, list[Any]] = {}
        for key in ("base", "x", "y", "marker.color", "customdata"):
            words = {"x": [0], "y": [-0.9]}.get(key)
            bars[key] = [data for panel in drawn for data in (panel[key], words)]
        bars["text"] = [data for panel in drawn for data in (None, panel["text"])]
        steps.append({"method": "restyle", "label": f"{parts}", "args": [bars]})
    return slider(steps, active - 1, "micro-batches: ", pad_bottom=40)
