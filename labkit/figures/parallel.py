"""Figures of tensor parallelism: what each rank holds, what more ranks gain, and how ranks wait for each other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from labkit.figures.published_panels import add_measured, add_published, row_label, source_lines
from labkit.figures.room import EDGE, bars_end, left_of, legend_below, shares_axis
from labkit.figures.summary import subtitle_of
from labkit.figures.theme import (
    LIMIT,
    SIDE_COLORS,
    SOFT,
    STAGE_COLORS,
    finish,
    heading,
    in_lines,
    panels,
    range_whiskers,
)
from labkit.models.config import ModelConfig
from labkit.models.shards import Shard, shard
from labkit.nsys.analysis.labelled import labelled
from labkit.nsys.analysis.steps import steps
from labkit.published import published_scaling
from labkit.stages import Phase, Stage
from labkit.studies.frames import number

if TYPE_CHECKING:
    import pandas as pd

    from labkit.nsys.trace import Trace
    from labkit.studies.parallel import ParallelStudy

RANK_COLORS = ("#2f6db5", "#d9702b", "#2f8f5b", "#8159a8", "#caa01e", "#b8433f", "#2b8a96", "#7d8896")
MATRICES = ("qkv.weight", "attn_out.weight", "ff1.weight", "ff2.weight")
IDEAL = "#7d8896"
IDEAL_LINE, LIMIT_LINE = "ideal: 1 / ranks", "what the memory allows"
MILLISECOND = 1_000_000  # in nanoseconds
TALLEST = 4.5  # height of a drawn matrix, in widths of the model; larger matrices are not drawn to scale
HEADS = 3.0  # the least height of the QKV matrix, so that the heads of keys and values can be told apart
LANES = 90  # pixels left of the lanes of ranks
GAP = 0.75  # between matrices, in widths of the model


@dataclass(frozen=True)
class MatrixCut:
    """Lines [begin, end) of a matrix along `dim`, and the ranks that hold them."""

    dim: int
    begin: int
    end: int
    holders: tuple[int, ...]


def pieces(shards: tuple[Shard, ...], name: str, shape: tuple[int, ...]) -> list[MatrixCut]:
    """The canonical weight `name` of this shape, cut where the ranks that hold it change."""
    cuts = [part.cut(name) for part in shards]
    dim = next((cut.dim for cut in cuts if cut), 0)
    ranges = [cut.ranges if cut else ((0, shape[dim]),) for cut in cuts]
    edges = sorted({edge for owned in ranges for pair in owned for edge in pair})
    matrix_cuts = []
    for begin, end in pairwise(edges):
        holders = tuple(rank for rank, owned in enumerate(ranges) if any(a <= begin and end <= b for a, b in owned))
        matrix_cuts.append(MatrixCut(dim, begin, end, holders))
    return matrix_cuts


def cut_figure(config: ModelConfig, ranks: int) -> go.Figure:
    """The rows or columns of a layer's matrices, and of the LM head, that each rank holds. Striped: several ranks.

    ValueError for more ranks than the model has heads.
    """
    shards = tuple(shard(config, ranks, rank) for rank in range(ranks))
    shapes = config.layer_shapes() | {"head.weight": (config.vocab_size, config.embedding_size)}
    figure, left = go.Figure(), 0.0
    drawn = [(name, shapes[name]) for name in (*MATRICES, "head.weight")]
    tallest, squeezed = 0.0, list[str]()
    for name, (rows, columns) in drawn:
        width, exact = min(columns / config.hidden_size, TALLEST), rows / config.hidden_size
        height = min(max(exact, HEADS if name == "qkv.weight" else 0.0), TALLEST)
        tallest = max(tallest, height)
        for piece in pieces(shards, name, (rows, columns)):
            _draw(figure, shards, name, piece, (rows, columns), (left, width, height))
        _name(figure, name, (rows, columns), left, width)
        squeezed += [name.removesuffix(".weight")] if height != exact else []
        for part, begin, size in _parts(config, name):
            middle, edge = (begin + 0.5 * size) / rows * height, begin / rows * height
            figure.add_annotation(text=part, x=left, y=middle, xanchor="right", xshift=-5, showarrow=False,
                                  font={"size": 12, "color": SOFT})  # fmt: skip
            if begin:
                line = {"color": "white", "width": 3}
                figure.add_shape(type="line", x0=left, x1=left + width, y0=edge, y1=edge, line=line)
        left += width + GAP
    for rank in range(ranks):
        marker = {"color": RANK_COLORS[rank % len(RANK_COLORS)], "symbol": "square", "size": 12}
        figure.add_scatter(x=[None], y=[None], mode="markers", marker=marker, name=_holding(shards[rank]))
    figure.update_xaxes(visible=False, range=[-0.45, left - GAP + 0.1])
    figure.update_yaxes(visible=False, range=[tallest + 0.1, -0.85])
    whole = "; ".join(_uncut(shards, config))
    subtitle = (
        f"{config.architecture}: {config.num_heads} query heads, {config.num_kv_heads} for keys and values, of "
        f"{config.head_dim}. Striped: held by more than one rank. Not to scale: {', '.join(squeezed) or 'none'}.<br>"
        f"On every rank: {whole}."
    )
    finish(figure, f"What each of {ranks} ranks holds of a layer, and of the head", subtitle, height=448, top=20)
    return legend_below(figure, [_holding(part) for part in shards], EDGE, axis=12)


def _draw(
    figure: go.Figure,
    shards: tuple[Shard, ...],
    name: str,
    piece: MatrixCut,
    shape: tuple[int, int],
    place: tuple[float, float, float],
) -> None:
    """Draws one rectangle, or stripes along the lines where several ranks hold it."""
    left, width, height = place
    stripes = max(1, 12 // len(piece.holders)) * len(piece.holders) if len(piece.holders) > 1 else 1
    begin, end = piece.begin / shape[piece.dim], piece.end / shape[piece.dim]
    lines = ("rows", "columns")[piece.dim]
    holders = " and ".join(f"rank {rank}" for rank in piece.holders)
    text = f"{name.removesuffix('.weight')}, {lines} {piece.begin:,} to {piece.end - 1:,}: {holders}"
    for stripe in range(stripes):
        low, high = stripe / stripes, (stripe + 1) / stripes
        across, along = ((low, high), (begin, end)) if piece.dim == 0 else ((begin, end), (low, high))
        x = [left + width * edge for edge in (across[0], across[1], across[1], across[0])]
        y = [height * edge for edge in (along[0], along[0], along[1], along[1])]
        color = RANK_COLORS[piece.holders[stripe % len(piece.holders)] % len(RANK_COLORS)]
        figure.add_scatter(
            x=x, y=y, fill="toself", mode="lines", fillcolor=color, line={"color": "white", "width": 1 / stripes},
            hoveron="fills", hoverinfo="text", text=text, name=text, showlegend=False,
        )  # fmt: skip


def _name(figure: go.Figure, name: str, shape: tuple[int, int], left: float, width: float) -> None:
    text = f"<b>{name.removesuffix('.weight')}</b><br>{shape[0]:,}<br>x {shape[1]:,}"
    figure.add_annotation(text=text, x=left + width / 2, y=-0.06, yanchor="bottom", showarrow=False, font={"size": 12})


def _parts(config: ModelConfig, name: str) -> Iterator[tuple[str, int, int]]:
    """The parts of a fused matrix: the name of each part, its first row and the number of its rows."""
    query, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    sizes = {}
    if name == "qkv.weight":
        sizes = {"Q": query, "K": kv, "V": kv}
    elif name == "ff1.weight" and config.gated:
        sizes = {"gate": config.intermediate_size, "up": config.intermediate_size}
    begin = 0
    for part, size in sizes.items():
        yield part, begin, size
        begin += size


def _holding(part: Shard) -> str:
    heads = f"{len(part.query)} query head{'s' if len(part.query) > 1 else ''}"
    kv = ", ".join(map(str, dict.fromkeys(part.kv)))
    return f"rank {part.rank}: {heads}, KV {kv}" if len(kv) < 12 else f"rank {part.rank}: {heads}"


def _uncut(shards: tuple[Shard, ...], config: ModelConfig) -> list[str]:
    """The weights of a layer that every rank holds whole."""
    names = config.layer_shapes()
    return [name for name in names if all(part.cut(name) is None for part in shards)] or ["nothing"]


def scaling_figure(study: ParallelStudy) -> go.Figure:
    """Time per token by number of ranks, with the ideal and the memory's limit; below, the waiting of each rank.

    The waiting is the share of a step in which a rank waits for the others.
    """
    sides, ranks = study.sides, [side.case.tp for side in study.sides]
    waiting = [f"rank {rank} of {side.case.tp}" for side in sides[1:] for rank in range(side.case.tp)]
    shares = [share for side in sides[1:] for share in side.communication_shares]
    heights = [280, 40 + 30 * len(waiting)]
    figure = panels(heights, 70)
    left = left_of(waiting)
    took = [side.per_token_ms for side in sides]
    rounds = [side.rounds_ms("per_token") for side in sides]
    _line(figure, ranks, [took[0] / size for size in ranks], IDEAL_LINE, IDEAL, "dot")
    limits = [comparison.limit_ratio for comparison in study.comparisons]
    if None not in limits:
        allowed = [took[0], *(took[0] / limit for limit in limits if limit)]
        _line(figure, ranks, allowed, LIMIT_LINE, LIMIT, "dash")
    figure.add_scatter(
        x=ranks, y=took, mode="lines+markers", name="measured", line={"color": SIDE_COLORS["candidate"], "width": 2.4},
        marker={"size": 10},
        error_y=range_whiskers(took, rounds),
        hovertemplate="%{x} ranks: %{y:.3g} ms per token<extra></extra>", row=1, col=1,
    )  # fmt: skip
    for size, ms in zip(ranks, took, strict=True):
        figure.add_annotation(text=f"<b>{number(ms)} ms</b>", x=size, y=ms, yanchor="bottom", yshift=12, xshift=4,
                              xanchor="left", showarrow=False, row=1, col=1)  # fmt: skip
    texts = [f"{share:.1%}" for share in shares]
    figure.add_bar(
        x=[100 * share for share in shares], y=waiting, orientation="h", marker_color=STAGE_COLORS[Stage.ALL_REDUCE],
        text=texts, textposition="outside", cliponaxis=False, showlegend=False,
        hovertemplate="%{y}: %{x:.2f} % of a step<extra></extra>", row=2, col=1,
    )  # fmt: skip
    figure.update_xaxes(title="ranks", tickvals=ranks, range=[0.75, ranks[-1] * 1.3], row=1, col=1)
    figure.update_yaxes(range=[0, max(max(times) for times in rounds) * 1.2], ticksuffix=" ms", row=1, col=1)
    most = bars_end([100 * share for share in shares], texts, left)
    figure.update_xaxes(**shares_axis(most, whole=100.0), row=2, col=1)
    figure.update_yaxes(autorange="reversed", row=2, col=1)
    largest = study.most
    limit = "" if largest.limit_ratio is None else f"; the memory allows {largest.limit_ratio:.2f}x"
    threads = sides[0].case.threads
    figure.add_annotation(heading("<b>per token</b>, median; whiskers: all samples", left=left), row=1, col=1)
    figure.add_annotation(heading("<b>waiting for others</b>, of a step", left=left), row=2, col=1)
    machine = f"each rank has {threads} thread{'s' if threads > 1 else ''}; {sides[0].environment.cpu}{limit}"
    title = f"{largest.case.tp} ranks against one, per token: {largest.claim()}"
    finish(figure, title, in_lines(subtitle_of(largest), machine), height=sum(heights) + 140)
    return legend_below(figure, [IDEAL_LINE, LIMIT_LINE, "measured"], left, axis=36)


def _line(figure: go.Figure, x: list[int], y: list[float], name: str, color: str, dash: str) -> None:
    line = {"color": color, "width": 2, "dash": dash}
    figure.add_scatter(x=x, y=y, mode="lines", name=name, line=line, hovertemplate="%{y:.3g} ms<extra></extra>",
                       row=1, col=1)  # fmt: skip


def waiting_figure(study: ParallelStudy) -> go.Figure | str:
    """One decode step of every rank on one time axis, and below it how far apart the ranks arrived at each sum.

    Markdown text where there is no capture.
    """
    if study.trace is None or study.collectives is None:
        return " ".join(study.remarks)
    step = _typical_step(study.trace)
    begin = step["start_ns"].min()
    stages = _stages_of(study.trace, step)
    figure = make_subplots(rows=2, cols=1, shared_xaxes=True, row_heights=[0.6, 0.4], vertical_spacing=0.16)
    for stage in [stage for stage in Stage if stage in set(stages["stage"])]:
        rows = stages[stages["stage"] == stage]
        figure.add_bar(
            base=(rows["start_ns"] - begin) / 1e6, x=(rows["end_ns"] - rows["start_ns"]) / 1e6,
            y=[f"rank {rank}" for rank in rows["rank"]], orientation="h", width=0.62, name=str(stage),
            marker={"color": STAGE_COLORS[stage], "line": {"width": 0}},
            hovertext=[f"{_layer_prefix(layer)}{stage}" for layer in rows["layer"]],
            hovertemplate="%{y}, %{hovertext}<br>%{x:.4f} ms<extra></extra>", row=1, col=1,
        )  # fmt: skip
    sums = study.collectives.frame
    sums = sums[(sums["phase"] == Phase.DECODE) & (sums["step"] == int(step["index"].iloc[0]))]
    unit, per_unit = ("µs", 1e3) if sums["skew_ns"].max() < MILLISECOND else ("ms", MILLISECOND)
    for rank, rows in sums[sums["last"]].groupby("rank"):
        figure.add_bar(
            x=(rows["start_ns"] - begin) / 1e6, y=rows["skew_ns"] / per_unit, name=f"rank {rank} came last",
            marker={"color": RANK_COLORS[int(rank) % len(RANK_COLORS)]},
            width=(step["end_ns"].max() - begin) / 1e6 / 150,
            hovertext=[f"{_layer_prefix(layer)}sum {order + 1}: rank {rank} came last" for layer, order in
                       zip(rows["layer"].fillna(-1), rows["order"], strict=True)],
            hovertemplate="%{hovertext}<br>%{y:.3g} " + unit + " after the first<extra></extra>", row=2, col=1,
        )  # fmt: skip
    figure.update_layout(barmode="overlay")
    figure.update_yaxes(autorange="reversed", row=1, col=1)
    top = max(sums["skew_ns"].max() / per_unit * 1.2, 1e-3)  # no tick at the end, where the heading is
    figure.update_yaxes(ticksuffix=f" {unit}", range=[0, top], row=2, col=1)
    end = (step["end_ns"].max() - begin) / 1e6
    figure.update_xaxes(ticksuffix=" ms", range=[0, end], showticklabels=True, nticks=7)
    figure.update_xaxes(title="time from the start of the step", row=2, col=1)
    figure.add_annotation(heading("<b>stages of each rank</b>", left=LANES), row=1, col=1)
    arrivals = heading("<b>arrival of the last rank</b> after the first, at each sum", left=LANES)
    figure.add_annotation(arrivals, row=2, col=1)
    finish(figure, "One decode step of every rank on one time axis", _waits(study, sums), height=480)
    return legend_below(figure, [trace.name for trace in figure.data], LANES, axis=60)


def _typical_step(trace: Trace) -> pd.DataFrame:
    """Rows, one for each rank, of the decode step of median duration. The first of several steps does not count."""
    rows = steps(trace)
    rows = rows[rows["phase"] == Phase.DECODE]
    durations_ns = rows.groupby("index")["duration_ns"].max()
    durations_ns = durations_ns.iloc[min(1, len(durations_ns) - 1) :].sort_values()
    return rows[rows["index"] == durations_ns.index[len(durations_ns) // 2]]


def _stages_of(trace: Trace, step: pd.DataFrame) -> pd.DataFrame:
    """The ranges of stages within a step: rank, stage, layer (-1: none), start_ns, end_ns."""
    ranges = labelled(trace)
    ranges = ranges[ranges["stage"].isin([str(stage) for stage in Stage])]
    row = step.set_index("process")
    bounds = ranges["process"].map(row["start_ns"]), ranges["process"].map(row["end_ns"])
    inside = ranges[(ranges["start_ns"] >= bounds[0]) & (ranges["end_ns"] <= bounds[1])]
    return inside.assign(rank=inside["process"].map(row["rank"]))


def _layer_prefix(layer: int) -> str:
    return "" if layer < 0 else f"layer {layer}, "


def _waits(study: ParallelStudy, sums: pd.DataFrame) -> str:
    assert study.capture is not None
    assert study.collectives is not None
    skew = sums.loc[sums["last"], "skew_ns"] / 1e3
    record, line = study.capture.record, f"{len(skew)} sums in the step"
    if len(skew):
        middle, most = number(float(np.median(skew))), number(float(skew.max()))
        line += f"; from the first rank's arrival to the last one's: median {middle} µs, at most {most} µs"
    remarks = "".join(f"<br>{remark}" for remark in study.collectives.remarks)
    profiler = f"{record.profiler}, op by op: the engine itself takes a step in one call, and waits less"
    return f"{line}<br>{record.case['model']}, {record.case['dtype']}, captured by {profiler}{remarks}"


def gpus_figure(study: ParallelStudy) -> go.Figure:
    """Speedups of the measured ranks over one rank, and below them the articles' speedups on several GPUs."""
    ratios = {f"{pair.case.tp} ranks against one": pair.ratio("per_token") for pair in study.comparisons}
    theirs = published_scaling(study.most.case.batch)
    heights = [20 + 60 * len(ratios), 20 + 80 * len(theirs)]
    figure = panels(heights, 70)
    labels = [
        row_label(row, f"{row['few_gpus']} to {row['many_gpus']} GPUs", f"{row['method']} {row['precision']}")
        for _, row in theirs.iterrows()
    ]
    left = left_of([*ratios, *labels])
    claims = [pair.claim().replace("] ", "]<br>") for pair in study.comparisons]
    allowed = [
        "" if pair.limit_ratio is None else f"<br>the memory allows {pair.limit_ratio:.2f}x"
        for pair in study.comparisons
    ]
    ours = [claim + limit for claim, limit in zip(claims, allowed, strict=True)]
    add_measured(figure, ratios, ours, left, study.most.candidate.name)
    times = [
        f"<b>{row['speedup']:.2f}x</b> of {row['many_gpus'] / row['few_gpus']:.3g}x<br>"
        f"{number(row['few_ms'], 4)} to {number(row['many_ms'], 4)} ms"
        for _, row in theirs.iterrows()
    ]
    add_published(figure, labels, theirs["speedup"], theirs["source"], times, left, row=2)
    most = study.most
    title = "Times faster with more ranks: ours, and the articles'"
    subtitle = in_lines(subtitle_of(most), most.candidate.environment.machine, *source_lines(theirs["source"]))
    return finish(figure, title, subtitle, sum(heights) + 150, left=left)
