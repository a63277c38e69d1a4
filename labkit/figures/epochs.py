"""The figure of a comparison's epochs: how its ratio and its interval came about."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from labkit.figures.summary import machine_line, subtitle_of
from labkit.figures.theme import CANDIDATE, SIDE_COLORS, SOFT, finish, heading, in_lines, whiskers
from labkit.statistics.sequential import planned_ratio, sequential_ratio
from labkit.studies.comparison_words import speedup_line

if TYPE_CHECKING:
    from labkit.harness import Comparison
    from labkit.statistics import Ratio

BAND, SAME_BAND = "rgba(11, 110, 153, 0.16)", "rgba(202, 160, 30, 0.18)"


def epochs_figure(comparison: Comparison) -> go.Figure:
    """Above, the ratio of each epoch or round, and the ratio so far with its interval.

    Below, each pair of turns at the memory's read rate during the pair. A comparison in rounds has no such panel.
    """
    panels = 2 if comparison.in_epochs and any(comparison.pair_rates()) else 1
    figure = make_subplots(rows=panels, cols=1, vertical_spacing=0.24)
    _draw_epochs(figure, comparison)
    if panels == 2:
        _draw_rates(figure, comparison)
    subtitle = in_lines(subtitle_of(comparison), machine_line(comparison), _scatter_line(comparison))
    return finish(figure, speedup_line(comparison), subtitle, height=300 * panels)


def _draw_epochs(figure: go.Figure, comparison: Comparison) -> None:
    ratios = np.exp(comparison.logs("per_token"))
    numbers, unit = list(range(1, len(ratios) + 1)), comparison.unit
    so_far = _ratios_so_far(comparison)
    counts = [count for count, _ in so_far]
    lows, highs = [ratio.low for _, ratio in so_far], [ratio.high for _, ratio in so_far]
    band = go.Scatter(
        x=[*counts, *reversed(counts)], y=[*highs, *reversed(lows)], fill="toself", fillcolor=BAND, line={"width": 0},
        hoverinfo="skip", name="interval",
    )  # fmt: skip
    color = SIDE_COLORS[CANDIDATE]
    line = go.Scatter(
        x=counts, y=[ratio.value for _, ratio in so_far], mode="lines", line={"color": color, "width": 2},
        customdata=[str(ratio) for _, ratio in so_far],
        hovertemplate=f"after {unit} %{{x}}: %{{customdata}}<extra></extra>",
        name="so far",
    )  # fmt: skip
    dots = go.Scatter(
        x=numbers, y=ratios, mode="markers", marker={"color": color, "size": 7}, error_y=_quartiles(comparison),
        hovertemplate=f"{unit} %{{x}}: %{{y:.3f}}x<extra></extra>", name=unit,
    )  # fmt: skip
    for trace in (band, line, dots):
        figure.add_trace(trace, row=1, col=1)
    same = comparison.rule.same
    if ratios.min() < 1 + 3 * same and ratios.max() > 1 - 3 * same:
        figure.add_hrect(1 / (1 + same), 1 + same, fillcolor=SAME_BAND, line_width=0, layer="below", row=1, col=1)
    figure.update_xaxes(title=unit, dtick=max(1, len(ratios) // 10), range=[0.5, len(ratios) + 0.5], row=1, col=1)
    figure.update_yaxes(ticksuffix="x", range=_range(ratios, lows, highs), row=1, col=1)
    figure.add_annotation(heading(f"{unit.capitalize()}s, and the ratio so far", left=130), row=1, col=1)


def _draw_rates(figure: go.Figure, comparison: Comparison) -> None:
    ratios = np.exp(np.concatenate(comparison.pair_logs()))
    rates = comparison.pair_rates()
    figure.add_scatter(
        x=rates, y=ratios, mode="markers", marker={"color": SOFT, "size": 5, "opacity": 0.5},
        hovertemplate="%{y:.3f}x at %{x:.1f} GB/s<extra></extra>", name="pair", row=2, col=1,
    )  # fmt: skip
    figure.update_xaxes(title="read rate of the memory during the pair, GB/s", nticks=8, row=2, col=1)
    low, high = np.quantile(ratios, (0.02, 0.98))
    figure.update_yaxes(ticksuffix="x", range=[low - (high - low) / 3, high + (high - low) / 3], row=2, col=1)
    figure.add_annotation(heading("Pairs of turns", left=130), row=2, col=1)


def _ratios_so_far(comparison: Comparison) -> list[tuple[int, Ratio]]:
    """Number of epochs, and the ratio with its interval at that moment, from the first interval on.

    With looks, the interval is that of the look that came next.
    """
    logs, rule = comparison.logs("per_token"), comparison.rule
    if not comparison.looks:
        return [(count, planned_ratio(logs[:count], rule)) for count in range(2, len(logs) + 1)]
    looks = [1 + sum(look < count for look in comparison.looks) for count in range(len(logs) + 1)]
    counts = range(min(rule.first_look, len(logs)), len(logs) + 1)
    return [(count, sequential_ratio(logs[:count], looks[count], rule)) for count in counts]


def _quartiles(comparison: Comparison) -> dict[str, object] | None:
    """Whiskers of an epoch: the middle half of its pairs."""
    if not comparison.in_epochs:
        return None
    lows, middles, highs = np.exp([np.quantile(logs, (0.25, 0.5, 0.75)) for logs in comparison.pair_logs()]).T
    return whiskers(middles, lows, highs) | {"color": SOFT, "thickness": 1, "width": 0}


def _range(ratios: np.ndarray, lows: list[float], highs: list[float]) -> list[float]:  # type: ignore[type-arg]
    """The axis holds all epochs, and the interval unless it is very wide."""
    low, high = float(ratios.min()), float(ratios.max())
    room = max(high - low, 0.02 * high)
    low, high = max(low - room, min([low, *lows])), min(high + room, max([high, *highs]))
    return [low - 0.1 * (high - low), high + 0.1 * (high - low)]


def _scatter_line(comparison: Comparison) -> str:
    return f"Whiskers: the middle half of the pairs; {comparison.scatter}" if comparison.scatter else ""
