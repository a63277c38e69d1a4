"""A slider over the number of resident layers: what each layer gains, and what it takes from the sequences."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import plotly.graph_objects as go

from labkit.figures.room import legend_below
from labkit.figures.streaming import COMPUTING, READING, grid, subtitle
from labkit.figures.theme import LIMIT, LOG, SIDE_COLORS, SOFT, finish, heading, in_lines, panels, slider
from labkit.studies.frames import number
from labkit.system.rounding import ceil_div

if TYPE_CHECKING:
    from labkit.harness.streaming.plan import PlannedStep, StreamingPlan
    from labkit.studies.larger_than_memory import StreamingStudy

MARGIN = 70
SLIDER = 86  # pixels above the axes
PANELS = (280, 70)  # pixels of the two panels
MOST_STOPS = 41  # of the slider
PARTS = {  # of the memory, each with its colour
    "outside the layers": SOFT,
    "layers in memory": COMPUTING,
    "slots": READING,
    "keys and values": SIDE_COLORS["candidate"],
    "workspace and other": "#c3cad3",
}
CURVE, LARGEST = "tokens per second, predicted", "largest batch that fits"


def residency_figure(study: StreamingStudy) -> go.Figure:
    """Predictions for the number of resident layers that a slider chooses.

    Tokens per second by batch, up to the largest batch that fits, and where the memory goes at that batch.
    """
    plan = study.plan
    stops = _stops(plan.trade)
    figure = panels(PANELS, 90)
    first = stops.index(plan.highest_throughput) if plan.highest_throughput in stops else 0
    drawn = _drawn(plan, stops[first])
    line = {"color": SIDE_COLORS["candidate"], "width": 2.4}
    figure.add_scatter(x=drawn["x"][0], y=drawn["y"][0], mode="lines", name=CURVE, line=line,
                       hovertemplate="batch %{x}: at most %{y:.3g} tokens/s<extra></extra>", row=1, col=1)  # fmt: skip
    figure.add_scatter(x=drawn["x"][1], y=drawn["y"][1], mode="markers", name=LARGEST,
                       marker={"size": 12, "color": LIMIT, "symbol": "diamond"},
                       hovertemplate="batch %{x}, the largest: %{y:.3g} tokens/s<extra></extra>",
                       row=1, col=1)  # fmt: skip
    for place, (name, color) in enumerate(PARTS.items(), start=2):
        figure.add_bar(x=drawn["x"][place], y=["memory"], orientation="h", name=name, marker_color=color, width=0.7,
                       hovertemplate=name + ": %{x:.4g} MB<extra></extra>", row=2, col=1)  # fmt: skip
    most = max(step.tokens_per_s for step in stops)
    least = min(plan.step(1, step.resident_layers).tokens_per_s for step in stops)
    figure.update_xaxes(type="log", range=[-0.05, math.log10(1.3 * max(step.batch for step in stops))], dtick=1,
                        title="sequences in a batch", row=1, col=1)  # fmt: skip
    figure.update_yaxes(
        type="log", range=[math.log10(least / 1.4), math.log10(most * 1.4)], tickformat="~s", dtick=1, row=1, col=1
    )
    figure.update_xaxes(range=[0, plan.memory / 1e6 * 1.04], ticksuffix=" MB", row=2, col=1)
    figure.update_yaxes(showticklabels=False, row=2, col=1)
    figure.add_vline(x=plan.memory / 1e6, line={"color": LIMIT, "width": 2}, row=2, col=1)
    figure.add_annotation(heading(f"<b>tokens per second</b>, all sequences, at most{LOG}", left=MARGIN), row=1, col=1)
    figure.add_annotation(heading("<b>where the memory goes</b> at the largest batch", left=MARGIN), row=2, col=1)
    note = "predicted from the rates of disk and processor; nothing here is measured"
    title = "Memory for layers, or for sequences?"
    finish(figure, title, in_lines(subtitle(study), note), height=sum(PANELS) + 90 + SLIDER + 100, top=SLIDER + 34)
    figure.update_layout(barmode="stack", sliders=[_slider(plan, stops, first)])
    return legend_below(figure, [CURVE, LARGEST, *PARTS], MARGIN, axis=48)


def _stops(trade: tuple[PlannedStep, ...]) -> list[PlannedStep]:
    """The planned steps at which the slider stops: all of them, or every n-th for very many layers."""
    every = ceil_div(len(trade), MOST_STOPS)
    return [step for place, step in enumerate(trade) if place % every == 0 or step is trade[-1]]


def _drawn(plan: StreamingPlan, largest: PlannedStep) -> dict[str, list[Any]]:
    """The x and y of all traces, in the order of the traces."""
    steps = [plan.step(batch, largest.resident_layers) for batch in grid(largest.batch)]
    parts = _parts(plan, largest)
    return {
        "x": [[step.batch for step in steps], [largest.batch], *([parts[name]] for name in PARTS)],
        "y": [[step.tokens_per_s for step in steps], [largest.tokens_per_s], *(["memory"] for _ in PARTS)],
    }


def _parts(plan: StreamingPlan, step: PlannedStep) -> dict[str, float]:
    """MB of each part of the memory."""
    footprint, case = plan.footprint, plan.case
    slots = 0 if step.resident_layers == footprint.layers else min(case.slots, footprint.layers)
    weights = footprint.outside + (step.resident_layers + slots) * footprint.layer
    cache = step.batch * case.tokens * footprint.kv_per_token
    sizes = {
        "outside the layers": footprint.outside,
        "layers in memory": step.resident_layers * footprint.layer,
        "slots": slots * footprint.layer,
        "keys and values": cache,
        "workspace and other": step.memory_bytes - weights - cache,
    }
    return {name: size / 1e6 for name, size in sizes.items()}


def _slider(plan: StreamingPlan, stops: list[PlannedStep], active: int) -> dict[str, Any]:
    """A slider whose stops replace the data of all traces. Frames would be missing on pages without a notebook."""
    steps = []
    for step in stops:
        label = (
            f"{step.resident_layers} of {plan.footprint.layers} layers; {step.batch:,} fit, "
            f"{number(step.tokens_per_s)} tokens/s"
        )
        steps.append({"method": "restyle", "label": label, "value": str(step.resident_layers),
                      "args": [_drawn(plan, step)]})  # fmt: skip
    return slider(steps, active, "in memory: ", pad_bottom=40)
