"""Figures of precisions: the cost and the quality of a token in each, and where storing the weights loses."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from labkit.figures.room import bars_end, left_of, legend_below
from labkit.figures.summary import answers_table
from labkit.figures.theme import (
    LIMIT,
    LOG,
    SIDE_COLORS,
    SOFT,
    finish,
    heading,
    in_lines,
    range_whiskers,
    whiskers,
    write_after,
)
from labkit.studies.frames import number
from labkit.system.markdown import markdown_table

if TYPE_CHECKING:
    from collections.abc import Callable

    from labkit.statistics import Mean
    from labkit.studies.matrix_errors import Histogram
    from labkit.studies.precision_study import PrecisionSide, PrecisionStudy

FLOAT, INT8, INT4, SYMMETRIC, FILE = "#7d8896", SIDE_COLORS["candidate"], "#d9702b", "#8159a8", "#2f8f5b"
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "star", "hexagon", "pentagon", "x")
MOST_TICKS = 16  # on an axis of layers
MARGIN = 80  # pixels left of the axes of numbers
BETWEEN = 54  # pixels for the ticks of a panel of bars and the heading of the next
ROW, HEAD = 24, 32  # pixels of a matrix in a heat map, and of the words above a map
KL, PERPLEXITY = "KL from float32, nats a token", "perplexity"


def color_of(precision: str) -> str:
    """One colour for each family of precisions."""
    if precision.startswith("int4"):
        return SYMMETRIC if "-symmetric" in precision else INT4
    return INT8 if precision.startswith("int8") else FILE if precision == "stored" else FLOAT


def front_figure(study: PrecisionStudy) -> go.Figure:
    """Time per token against KL and, for trained weights, perplexity. Left is faster, down is closer to float32.

    The line joins the precisions that no other beats on both. A mark shows the time that the memory allows a precision.
    """
    rows = 2 if study.trained else 1
    figure = make_subplots(rows=rows, cols=1, shared_xaxes=True, vertical_spacing=0.12)
    slowest = max(max(side.measurement.rounds_ms("per_token")) for side in study.sides)
    kls = {side.precision: side.evaluation.kl for side in study.sides}
    least = min((kl.value for kl in kls.values() if kl.value > 0), default=1e-6) / 4  # where 0 is drawn

    def kl_of(side: PrecisionSide) -> Mean:
        return kls[side.precision].map(lambda nats: max(nats, least))

    figure.add_scatter(
        x=[side.measurement.per_token_ms for side in study.front], y=[kl_of(side).value for side in study.front],
        mode="lines", line={"shape": "hv", "color": SOFT, "width": 1.6}, name="the best of both", hoverinfo="skip",
        row=1, col=1,
    )  # fmt: skip
    _points(figure, study, kl_of, row=1)
    if study.trained:
        _points(figure, study, perplexity_of, row=2)
        words = heading(f"<b>{PERPLEXITY}</b>; intervals: of the change from float32", left=MARGIN)
        figure.add_annotation(words, row=2, col=1)
        figure.update_yaxes(tickformat="~g", row=2, col=1)
    figure.add_annotation(heading(f"<b>{KL}</b>{LOG}; 0 is at the bottom", left=MARGIN), row=1, col=1)
    most = max(max(kl.value, kl.high or 0.0) for kl in kls.values())
    figure.update_yaxes(type="log", **_powers(max(most, least), least), row=1, col=1)
    figure.update_xaxes(range=[0, slowest * 1.05], ticksuffix=" ms", showticklabels=True)
    figure.update_xaxes(title="ms per token, median; whiskers: all samples", row=rows, col=1)
    finish(figure, "What a token costs, and what it is worth", _subtitle(study), height=60 + 300 * rows)
    shown = [trace.name for trace in figure.data if trace.showlegend is not False]
    return legend_below(figure, shown, MARGIN, axis=60)


def perplexity_of(side: PrecisionSide) -> Mean:
    """Perplexity of a side, with the interval of its change from the reference, since both read the same text."""
    reference = side.evaluation.reference_perplexity.value
    return side.evaluation.perplexity_change.map(lambda change: reference * (1 + change))


def costs_figure(study: PrecisionStudy) -> go.Figure:
    """Time per token with the limit of each precision, and below it the bytes that a token reads."""
    sides = study.by_time
    figure = make_subplots(rows=2, cols=1, vertical_spacing=BETWEEN / (64 + 60 * len(sides)))
    names, colors = [side.precision for side in sides], [color_of(side.precision) for side in sides]
    took = [side.measurement.per_token_ms for side in sides]
    rounds = [side.measurement.rounds_ms("per_token") for side in sides]
    figure.add_bar(
        x=took, y=names, orientation="h", marker_color=colors, width=0.56, showlegend=False,
        error_x=range_whiskers(took, rounds),
        hovertemplate="%{y}: %{x:.3g} ms per token<extra></extra>", row=1, col=1,
    )  # fmt: skip
    limits = [(side.measurement.floor_ms, side.precision) for side in sides if side.measurement.floor_ms is not None]
    figure.add_scatter(
        x=[ms for ms, _ in limits], y=[name for _, name in limits], mode="markers", name="limit of the memory",
        marker={"symbol": "line-ns", "size": 20, "line": {"width": 3, "color": LIMIT}, "color": LIMIT},
        hovertemplate="%{y}: at least %{x:.3g} ms<extra></extra>", row=1, col=1,
    )  # fmt: skip
    megabytes = [side.measurement.work.decode_bytes / 1e6 if side.measurement.work else 0.0 for side in sides]
    figure.add_bar(
        x=megabytes, y=names, orientation="h", marker_color=colors, width=0.56, showlegend=False,
        text=[f"{number(size)} MB" if size else "not counted" for size in megabytes], textposition="outside",
        cliponaxis=False, textfont={"size": 12}, hovertemplate="%{y}: %{x:.4g} MB a token<extra></extra>", row=2, col=1,
    )  # fmt: skip
    left, texts, longest = left_of(names), [f"{number(ms)} ms" for ms in took], [max(times) for times in rounds]
    write_after(figure, texts, longest, names, left, unit=" ms", log=False, row=1, size=12)
    figure.update_xaxes(nticks=6, row=1, col=1)
    end = bars_end(megabytes, ["not counted"] * len(sides), left, size=12)
    figure.update_xaxes(range=[0, end], ticksuffix=" MB", nticks=5, row=2, col=1)
    figure.update_yaxes(autorange="reversed")
    figure.add_annotation(heading("<b>per token</b>; whiskers: all samples", left=left), row=1, col=1)
    figure.add_annotation(heading("<b>read per token</b>", left=left), row=2, col=1)
    finish(figure, "Bytes and milliseconds of a token", _subtitle(study), height=150 + 60 * len(sides))
    return legend_below(figure, ["limit of the memory"], left, axis=36)


def precision_table(study: PrecisionStudy) -> str:
    """Markdown: a row for each precision, the fastest first, and a line for each that the model cannot have."""
    columns = ["precision", "weights, MB", "ms per token", "of the limit", f"against {study.first.precision}"]
    columns += ["perplexity"] if study.trained else []
    columns += ["KL, nats", "same next token", "error of the layers", "error of the LM head"]
    table = markdown_table(columns, (_row(study, side) for side in study.by_time))
    refused = [f"- `{refusal.precision}` cannot be: {refusal.reason}." for refusal in study.refused]
    return "\n".join([table, "", *refused])


def precision_answers(study: PrecisionStudy) -> str:
    """Markdown with the question and the answer of each precision."""
    by_precision = {side.precision: side.measurement.answer for side in study.sides}
    return answers_table(study.first.measurement.question, by_precision)


def errors_figure(study: PrecisionStudy) -> go.Figure | str:
    """A heat map for each way to store the layers: the error of each matrix over the error of all matrices.

    Markdown text where no way loses anything.
    """
    stored = list({layers.precision: layers for side in study.sides if (layers := study.matrices(side))}.values())
    shown = [layers for layers in stored if not layers.exact]
    exact = [layers.precision for layers in stored if layers.exact]
    if not shown:
        return "None of these precisions loses anything: each stores the layers as the model has them."
    roles = list(dict.fromkeys(error.matrix for error in shown[0].errors))
    height = HEAD + ROW * len(roles)
    figure = make_subplots(rows=len(shown), cols=1, shared_xaxes=True, vertical_spacing=HEAD / (height * len(shown)))
    for row, layers in enumerate(shown, start=1):
        errors = [[error for error in layers.errors if error.matrix == role] for role in roles]
        figure.add_heatmap(
            x=[error.layer for error in errors[0]], y=roles, coloraxis="coloraxis", xgap=1, ygap=1,
            z=[[error.error / layers.error for error in line] for line in errors],
            customdata=[[100 * error.error for error in line] for line in errors],
            hovertemplate="layer %{x}, %{y}: %{customdata:.3g} %, %{z:.2f}x<extra>" + layers.precision + "</extra>",
            row=row, col=1,
        )  # fmt: skip
        text = f"<b>{layers.precision}</b>: {number(100 * layers.error)} %, all together"
        figure.add_annotation(heading(text, left=MARGIN), row=row, col=1)
    figure.update_yaxes(autorange="reversed", showgrid=False)
    apart = max(1, math.ceil(len(errors[0]) / MOST_TICKS))  # so that a tick is a layer
    figure.update_xaxes(showgrid=False, showticklabels=False, tick0=0, dtick=apart)
    figure.update_xaxes(title="layer", showticklabels=True, row=len(shown), col=1)
    measure = "Frobenius norm of the loss over that of the matrix; colours: over the error of all matrices"
    omitted = (
        f"not drawn, as they lose nothing: weights that were such codes before: {', '.join(exact)}" if exact else ""
    )
    subtitle = in_lines(_model(study), measure, omitted)
    finish(figure, "Where the error sits: layer by layer, matrix by matrix", subtitle, 80 + height * len(shown))
    bar = {"ticksuffix": "x", "thickness": 14, "nticks": 6}
    return figure.update_layout(coloraxis={"colorscale": "YlOrRd", "colorbar": bar}, margin={"l": MARGIN, "r": 80})


def outliers_figure(study: PrecisionStudy) -> go.Figure:
    """The numbers of the matrix that loses most with a scale per row, and the magnitudes that scales have to reach."""
    spread = study.spread
    figure = make_subplots(rows=2, cols=1, vertical_spacing=0.2)
    _histogram(figure, spread.numbers, "numbers", FLOAT, row=1)
    for part, name, color, median in (
        (spread.rows, "of a whole row", INT8, spread.row_median),
        (spread.groups, f"of {spread.group} inputs", INT4, spread.group_median),
    ):
        _histogram(figure, part, f"{name}, median {number(median)}", color, row=2, share=True)
    ticks = _powers(max(spread.numbers.counts), 1)
    figure.update_yaxes(type="log", **ticks, title="numbers in a bin", row=1, col=1)
    figure.update_yaxes(ticksuffix=" %", title="share of rows, of groups", rangemode="tozero", row=2, col=1)
    figure.update_xaxes(title="standard deviations of the matrix", row=2, col=1)
    figure.add_annotation(heading("<b>all numbers</b>", left=MARGIN), row=1, col=1)
    figure.add_annotation(heading("<b>largest magnitude</b>, which the codes have to reach", left=MARGIN), row=2, col=1)
    source = f"{spread.matrix} of layer {spread.layer}, which loses most with 8 bits and a scale for each row"
    title = "Outliers: what a scale has to reach"
    finish(figure, title, f"{_model(study)}<br>{source}", height=500)
    legend_below(figure, [trace.name for trace in figure.data if trace.showlegend], MARGIN, axis=60)
    return figure.update_layout(barmode="overlay", bargap=0)


def _row(study: PrecisionStudy, side: PrecisionSide) -> list[str]:
    measured, scores = side.measurement, side.evaluation
    share = "unknown" if measured.floor_share is None else f"{measured.floor_share:.0%}"
    against = "" if side is study.first else study.comparison(side).claim()
    cells = [f"`{side.precision}`", number(scores.weight_bytes / 1e6, 4), number(measured.per_token_ms), share, against]
    if study.trained:
        cells.append(f"{scores.perplexity.value:.2f}{_interval(perplexity_of(side), '.2f') if scores.kl.value else ''}")
    stored = study.matrices(side)
    return [
        *cells,
        number(scores.kl.value, 2),
        f"{scores.agreement.value:.1%}",
        _percent(stored.error if stored else 0.0),
        _percent(side.head.error if side.head else 0.0),
    ]


def _percent(error: float) -> str:
    return f"{number(100 * error, 2)} %"


def _interval(mean: Mean, form: str) -> str:
    return "" if mean.low is None or mean.high is None else f" [{mean.low:{form}}, {mean.high:{form}}]"


def _points(figure: go.Figure, study: PrecisionStudy, value: Callable[[PrecisionSide], Mean], *, row: int) -> None:
    """Each side at its time and value, with whiskers, and the mark of its limit."""
    for index, side in enumerate(study.by_time):
        took, rounds, mean = side.measurement.per_token_ms, side.measurement.rounds_ms("per_token"), value(side)
        low, high = (mean.value if end is None else end for end in (mean.low, mean.high))
        if side.measurement.floor_ms is not None:
            figure.add_scatter(
                x=[side.measurement.floor_ms, took], y=[mean.value, mean.value], mode="lines+markers",
                line={"color": LIMIT, "width": 1, "dash": "dot"}, name="limit of the memory", legendgroup="limit",
                showlegend=index == 0 and row == 1, hoverinfo="skip",
                marker={"symbol": "line-ns", "size": [16, 0], "line": {"width": 2.4, "color": LIMIT}},
                row=row, col=1,
            )  # fmt: skip
        figure.add_scatter(
            x=[took], y=[mean.value], mode="markers", name=side.precision, legendgroup=side.precision,
            showlegend=row == 1,
            marker={"size": 13, "symbol": SYMBOLS[index % len(SYMBOLS)], "color": color_of(side.precision),
                    "line": {"width": 1, "color": "white"}},
            error_x=range_whiskers([took], [rounds]),
            error_y=whiskers([mean.value], [min(low, mean.value)], [max(high, mean.value)]),
            hovertemplate="%{x:.3g} ms, %{y:.3g}<extra>" + side.precision + "</extra>", row=row, col=1,
        )  # fmt: skip


def _histogram(
    figure: go.Figure, histogram: Histogram, name: str, color: str, *, row: int, share: bool = False
) -> None:
    whole = sum(histogram.counts)
    heights = [100 * count / whole if share else count or None for count in histogram.counts]
    figure.add_bar(
        x=histogram.middles, y=heights, width=histogram.width, name=name, opacity=0.75,
        marker={"color": color, "line": {"width": 0}}, showlegend=share,
        hovertemplate="%{x:.2f}: %{y:.3g}" + (" %" if share else "") + "<extra>" + name + "</extra>", row=row, col=1,
    )  # fmt: skip


def _powers(most: float, least: float) -> dict[str, list[float] | list[str]]:
    """Ticks of a logarithmic axis, each ten times the one before, as plain numbers."""
    ticks = [10.0**power for power in range(math.floor(math.log10(least)), math.ceil(math.log10(most)) + 1)]
    return {"tickvals": ticks, "ticktext": [number(tick, 1) for tick in ticks]}


def _model(study: PrecisionStudy) -> str:
    case = study.first.measurement.case
    return f"{case.model} ({case.origin})"


def _subtitle(study: PrecisionStudy) -> str:
    """The case, the machine, and a warning where the times are not trustworthy."""
    side = study.first
    case, text = side.measurement.case, side.evaluation.case
    runs = f"batch 1, {case.prompt_tokens} prompt + {case.new_tokens} new tokens, {len(side.measurement.runs)} samples"
    measured = f"{_model(study)}; {runs}; quality on {text.tokens:,} tokens of {text.text}"
    lines = [measured, side.measurement.environment.machine]
    doubts = [short for comparison in study.comparisons.values() if (short := comparison.trust().short)]
    return in_lines(*lines, *doubts[:1])
