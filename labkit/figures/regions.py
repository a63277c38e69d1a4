"""Figures of a layer's regions: what is fused, what fusion gains, and how close each region is to the limit."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from labkit.figures.room import EDGE, folded, left_of, legend_below
from labkit.figures.theme import (
    INK,
    LIMIT,
    PUBLISHED,
    SIDE_COLORS,
    SOFT,
    STAGE_COLORS,
    finish,
    heading,
    in_lines,
    whiskers,
    write_after,
)
from labkit.harness.regions.sides import FUSED, GRAPH, ONE_CALL, OWN_GEMM, SDPA, TITLES, UNFUSED
from labkit.stages import Stage
from labkit.studies.frames import number
from labkit.system.partly import NotMeasuredError

if TYPE_CHECKING:
    from labkit.harness.regions.records import LayerCase, RegionMeasurement
    from labkit.studies.kernels import KernelStudy

OPACITY = {UNFUSED: 0.3, SDPA: 0.45, OWN_GEMM: 0.55, FUSED: 0.8, ONE_CALL: 1.0}
SYMBOLS = {UNFUSED: "circle-open", FUSED: "circle", ONE_CALL: "diamond"}
DASH = "–"
PER_ROW = 4  # boxes of a drawing side by side
LABEL, BOX = 120, 90  # pixels of a bar's name, and of the words in a box


def case_line(case: LayerCase) -> str:
    """The case of the measured layers in words."""
    threads = "" if case.impl == "triton" else f"{case.threads} threads, "
    return (
        f"{case.model}, {case.dtype}, batch {case.batch}, {case.context} tokens in the cache; {threads}"
        f"{case.layers} layers one after the other"
    )


def regions_figure(study: KernelStudy) -> go.Figure:
    """A panel per region: microseconds of each side, whiskers over the middle half of the rounds, and the floor."""
    rows = study.regions
    figure = make_subplots(rows=len(rows), cols=1, vertical_spacing=0.36 / len(rows))
    titles = {side: folded(title, LABEL) for side, title in TITLES.items()}
    left = left_of([titles[side] for side in titles if any(side in row.rounds_us for row in rows)])
    for index, row in enumerate(rows, 1):
        sides = [side for side in TITLES if side in row.rounds_us]
        medians = [row.median_us(side) or 0.0 for side in sides]
        quartiles = [row.quartiles_us(side) for side in sides]
        lows, highs = [low for low, _ in quartiles], [high for _, high in quartiles]
        names = [titles[side] for side in sides]
        figure.add_bar(
            x=medians,
            y=names,
            orientation="h",
            marker={
                "color": STAGE_COLORS[Stage(row.region)],
                "opacity": [OPACITY[side.removesuffix(GRAPH)] for side in sides],
            },
            error_x=whiskers(medians, lows, highs),
            hovertemplate="%{y}: %{x:.1f} µs<extra>" + row.region + "</extra>",
            row=index,
            col=1,
        )
        texts = [_time(row, side) for side in sides]
        write_after(figure, texts, highs, names, left, unit=" µs", log=False, row=index, size=13)
        if (floor := row.floor_us) is not None:
            figure.add_vline(x=floor, line={"color": LIMIT, "dash": "dash", "width": 1.6}, row=index, col=1)
        published = f"; published: {row.published[0]:.1f}x" if row.published else ""
        doubtful = "" if row.trust.trustworthy else "; <b>not trustworthy</b>"
        region_title = heading(f"<b>{row.region}</b>, {_ops(row)}{published}{doubtful}", left=left)
        figure.add_annotation(region_title, row=index, col=1)
    figure.update_xaxes(nticks=6)
    figure.update_yaxes(autorange="reversed")
    dashed = (
        "dashed: the least time that reading the region's bytes takes here; each region has an axis of its own length"
    )
    doubted = [row for row in rows if not row.trust.trustworthy]
    grade = f"{', '.join(row.region for row in doubted)}: {doubted[0].trust.short}" if doubted else ""
    machine = f"{rows[0].environment.machine}; {rows[0].measured_line}"
    subtitle = in_lines(case_line(rows[0].case), machine, dashed, grade)
    return finish(figure, "Each region, unfused and fused", subtitle, height=40 + 230 * len(rows), left=left)


def _time(row: RegionMeasurement, side: str) -> str:
    """The median of a side, and its speedup over the unfused side."""
    took = f"{number(row.median_us(side) or 0.0)} µs"
    if side in (UNFUSED, UNFUSED + GRAPH):
        return took
    return f"{took}<br>{row.ratio(UNFUSED + GRAPH if side.endswith(GRAPH) else UNFUSED, side)}"


def regions_table(study: KernelStudy) -> pd.DataFrame:
    """The figures of every region as text, a column per region; a dash where a region has no such figure."""
    rows = study.regions
    lines = {f"{title}, µs": [_us(row.median_us(side)) for row in rows] for side, title in TITLES.items()}
    for side in (UNFUSED, FUSED):
        lines[f"{TITLES[side]}, from the cache, µs"] = [_us(row.median_us(side, warm=True)) for row in rows]
    lines["fused, times faster, both called from Python"] = [str(row.ratio()) for row in rows]
    lines["fused, times faster, as the engine runs it"] = [
        str(row.ratio(*row.in_engine)) if row.in_engine[1] in row.rounds_us else DASH for row in rows
    ]
    lines["verdict"] = [str(row.verdict) for row in rows]
    lines["scatter of the gain"] = [str(row.scatter) if row.scatter else DASH for row in rows]
    lines["the gain follows the rate"] = [str(row.by_rate) if row.by_rate else DASH for row in rows]
    lines["torch ops, unfused"] = [str(len(row.ops)) for row in rows]
    lines["read and written, unfused, MB"] = [number(row.unfused_bytes / 1e6) for row in rows]
    lines["must be read, MB"] = [number(row.bytes / 1e6) for row in rows]
    lines["of the limit, as the engine runs it"] = [
        DASH if (share := row.floor_share(row.in_engine[1])) is None else f"{share:.0%}" for row in rows
    ]
    lines["published, times faster"] = [f"{row.published[0]:.1f}x" if row.published else DASH for row in rows]
    lines["trust"] = [f"not trustworthy: {row.trust.why}" if row.trust.doubts else "trustworthy" for row in rows]
    known = {name: cells for name, cells in lines.items() if set(cells) != {DASH}}
    return pd.DataFrame.from_dict(known, orient="index", columns=[row.region for row in rows])


def _us(value: float | None) -> str:
    return DASH if value is None else number(value)


def fusion_figure(row: RegionMeasurement) -> go.Figure:
    """A region before and after fusion: its torch ops as they were counted, and the one call that replaces them."""
    figure = go.Figure()
    color = STAGE_COLORS[Stage(row.region)]
    lines = [row.ops[begin : begin + PER_ROW] for begin in range(0, len(row.ops), PER_ROW)]
    for depth, names in enumerate(lines):
        for column, name in enumerate(names):
            _box(figure, column, -depth, 0.86, folded(_op_name(name), BOX, 12), color, 0.22)
            if column:
                _arrow(figure, column - 0.14, column, -depth)
    bottom = -len(lines) - 0.5
    width = min(PER_ROW, len(row.ops)) - 0.14
    _box(figure, 0, bottom, max(width, 2.0), f"<b>{row.region}</b>", color, 1.0)
    reads = f"{number(row.unfused_bytes / 1e6)} MB read and written"
    needs = "all of it in the cache" if row.floor_us is None else f"{number(row.bytes / 1e6)} MB must be read"
    _note(figure, 0.6, f"unfused: {_ops(row)}, {reads}")
    _note(figure, bottom + 0.6, f"fused: one call, {needs}")
    figure.update_xaxes(visible=False, range=[-0.1, PER_ROW])
    figure.update_yaxes(visible=False, range=[bottom - 0.4, 0.85])
    title = f"Region {row.region}: what is fused"
    finish(figure, title, case_line(row.case), height=50 + 72 * (len(lines) + 1), top=12)
    return figure.update_layout(margin={"l": EDGE, "b": 12})


def ladder_figure(study: KernelStudy) -> go.Figure:
    """Microseconds of a layer as one region after another is fused, down to the one-call step and the floor."""
    ladder = study.ladder
    if ladder is None:
        raise NotMeasuredError("the run was stopped before the whole layer was timed; run it again")
    medians = [ladder.median_us(rung) for rung in ladder.rungs]
    rungs = [folded(rung, LABEL) for rung in ladder.rungs]
    left = left_of(rungs)
    colors = [SIDE_COLORS["baseline"]]
    colors += [STAGE_COLORS[stage] for stage in (Stage.QKV, Stage.ATTENTION, Stage.MLP, Stage.RESIDUAL)]
    colors += [STAGE_COLORS[Stage.MLP_OUT], SIDE_COLORS["candidate"]]
    figure = go.Figure(
        go.Bar(
            x=medians,
            y=rungs,
            orientation="h",
            marker_color=colors,
            hovertemplate="%{y}: %{x:.1f} µs<extra></extra>",
        )
    )
    texts = [f"{number(medians[0])} µs"]
    for rung, before, median in zip(ladder.rungs[1:], medians, medians[1:], strict=False):
        change = f"{'saves' if median <= before else 'costs'} {number(abs(before - median))}"
        texts.append(f"{number(median)} µs, {change}<br>{ladder.ratio(rung)}")
    write_after(figure, texts, medians, rungs, left, unit=" µs", log=False, size=13)
    if (floor := ladder.floor_us) is not None:
        figure.add_vline(x=floor, line={"color": LIMIT, "dash": "dash", "width": 1.6})
    figure.update_xaxes(nticks=6)
    figure.update_yaxes(autorange="reversed")
    note = "a whole step, time of one layer; dashed: reading its bytes"
    machine = f"{ladder.environment.machine}; {ladder.measured_line}"
    scattered = f"scatter of the gain: {ladder.scatter}" if ladder.scatter else ""
    follows = f"the gain follows the rate of the memory: {ladder.by_rate}" if ladder.by_rate else ""
    subtitle = in_lines(case_line(ladder.case), machine, scattered, follows, note, ladder.trust.short)
    return finish(figure, "One region after another", subtitle, height=420, top=8, left=left)


def roofline_figure(study: KernelStudy) -> go.Figure:
    """GFLOP/s over FLOPs per byte, both axes logarithmic, under the roof of this machine's memory and arithmetic."""
    rows, peak_gflop_s = study.regions, study.peak_gflop_s
    figure = go.Figure()
    bandwidth = rows[0].read_bandwidth_gb_s
    shown = [row for row in rows if row.flops]
    intensities = [row.flops / row.bytes for row in shown]
    left, right = min(intensities) / 3, max(10 * max(intensities), 3 * peak_gflop_s / (bandwidth or 1.0))
    if bandwidth is not None:
        ridge = peak_gflop_s / bandwidth
        figure.add_scatter(
            x=[left, ridge, right],
            y=[left * bandwidth, peak_gflop_s, peak_gflop_s],
            mode="lines",
            line={"color": LIMIT, "dash": "dash", "width": 2},
            hoverinfo="skip",
            showlegend=False,
        )
    names = []
    for row, intensity in zip(shown, intensities, strict=True):
        on_gpu = row.in_engine[0] != UNFUSED
        for name, symbol in SYMBOLS.items():
            side = name + GRAPH if on_gpu else name
            took = row.median_us(side)
            if took is None:
                continue
            names.append(f"{row.region}, {side}")
            figure.add_scatter(
                x=[intensity],
                y=[row.flops / took / 1e3],
                mode="markers",
                marker={"color": STAGE_COLORS[Stage(row.region)], "symbol": symbol, "size": 12, "line": {"width": 2}},
                name=names[-1],
                hovertemplate=f"{row.region}, {side}: %{{y:.1f}} GFLOP/s at %{{x:.2f}} FLOP per byte<extra></extra>",
            )
    figure.update_xaxes(type="log", dtick=1, title="FLOPs per byte that must be read")
    figure.update_yaxes(type="log", dtick=1, title="GFLOP/s")
    read = f"{bandwidth:.0f} GB/s read" if bandwidth is not None else "bandwidth unknown"
    subtitle = f"{case_line(rows[0].case)}<br>roof: {read}, {peak_gflop_s:,.0f} GFLOP/s in a large matrix product"
    finish(figure, "Under the roof", subtitle, height=430, top=12)
    return legend_below(figure, names, 80, axis=60)


def _ops(row: RegionMeasurement) -> str:
    return "1 torch op" if len(row.ops) == 1 else f"{len(row.ops)} torch ops"


def _box(figure: go.Figure, x: float, y: float, width: float, text: str, color: str, opacity: float) -> None:
    figure.add_shape(
        type="rect", x0=x, x1=x + width, y0=y - 0.32, y1=y + 0.32, fillcolor=color, opacity=opacity,
        line={"color": color, "width": 1.5},
    )  # fmt: skip
    font = {"size": 12, "color": INK if opacity < 0.5 else "white"}
    figure.add_annotation(x=x + width / 2, y=y, text=text, showarrow=False, font=font)


def _op_name(name: str) -> str:
    """A torch op's name in words, which can be broken into lines."""
    return name.removeprefix("native_").strip("_").replace("_", " ")


def _arrow(figure: go.Figure, start: float, end: float, y: float) -> None:
    figure.add_annotation(
        x=end, y=y, ax=start, ay=y, xref="x", yref="y", axref="x", ayref="y", text="", showarrow=True, arrowhead=2,
        arrowsize=0.9, arrowcolor=SOFT,
    )  # fmt: skip


def _note(figure: go.Figure, y: float, text: str) -> None:
    figure.add_annotation(x=0, y=y, text=text, xanchor="left", showarrow=False, font={"size": 13, "color": PUBLISHED})


def layer_figure(study: KernelStudy, regions: int) -> go.Figure:
    """One layer, unfused above fused, on one time axis, with the torch ops below their regions.

    The first `regions` regions are in full colour, the others are faded.
    """
    timeline, shown = study.timeline, {row.region for row in study.regions[:regions]}
    figure = go.Figure()
    lanes = list(dict.fromkeys(span.lane for span in timeline))
    for region in dict.fromkeys(span.region for span in timeline):
        for inner in (False, True):
            spans = [span for span in timeline if span.region == region and (span.op is not None) is inner]
            figure.add_bar(
                base=[span.start_us for span in spans],
                x=[span.took_us for span in spans],
                y=[[span.lane for span in spans], ["ops" if inner else "regions"] * len(spans)],
                orientation="h",
                marker={
                    "color": STAGE_COLORS[Stage(region)],
                    "opacity": 1.0 if region in shown else 0.18,
                    "line": {"color": "white", "width": 0.8},
                },
                customdata=[span.op or region for span in spans],
                name=region,
                showlegend=not inner,
                legendgroup=region,
                hovertemplate="%{customdata}: %{x:.1f} µs, from %{base:.1f} µs<extra>" + region + "</extra>",
            )
    ends = {lane: max(span.start_us + span.took_us for span in timeline if span.lane == lane) for lane in lanes}
    figure.update_layout(barmode="overlay", bargap=0.15)
    figure.update_xaxes(range=[0, max(ends.values()) * 1.02], ticksuffix=" µs", nticks=7)
    figure.update_yaxes(autorange="reversed")
    totals = ", ".join(f"{lane} {number(end)} µs" for lane, end in ends.items())
    subtitle = f"{totals}; as torch.profiler saw it, its own cost included"
    finish(figure, "One layer on one time axis", subtitle, height=250, top=8)
    return legend_below(figure, list(dict.fromkeys(span.region for span in timeline)), 130, axis=36)
