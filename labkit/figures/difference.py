"""The explained difference of two captures: from vanilla's step to fused's, part by part."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pandas as pd
import plotly.graph_objects as go

from labkit.figures.room import BREAK, bars_end, folded, left_of, lines_of
from labkit.figures.theme import (
    BASELINE,
    CANDIDATE,
    LIMIT,
    SIDE_COLORS,
    SOFT,
    STAGE_COLORS,
    finish,
    in_lines,
    whiskers,
)
from labkit.stages import Stage

if TYPE_CHECKING:
    from labkit.nsys.analysis.difference import Difference
    from labkit.nsys.analysis.side import Side

SAVED, COST = STAGE_COLORS[Stage.MLP], LIMIT
ROW = 58  # pixels
NAME, NOTE = 140, 190  # pixels of a bar's name, and of the note after the bar


@dataclass(frozen=True)
class Bar:
    """A row of the waterfall: a bar from `base` to `end`."""

    name: str
    base: float
    end: float
    low: float | None  # the interval of `end`; None: unknown
    high: float | None
    color: str
    text: str

    @property
    def least(self) -> float:
        return min(self.base, self.end, self.end if self.low is None else self.low)

    @property
    def most(self) -> float:
        return max(self.base, self.end, self.end if self.high is None else self.high)


def difference_figure(difference: Difference) -> go.Figure:
    """A waterfall: vanilla's mean step, what each part takes away (green) or adds (red), fused's mean step.

    The thin lines are the 95 % intervals of the parts over steps.
    """
    bars = _bars(difference)
    places = list(range(len(bars)))
    figure = go.Figure(
        go.Bar(
            x=[bar.end - bar.base for bar in bars],
            base=[bar.base for bar in bars],
            y=places,
            orientation="h",
            width=0.55,
            marker_color=[bar.color for bar in bars],
            customdata=[bar.name for bar in bars],
            hovertemplate="%{customdata}: %{x:+.4f} ms<extra></extra>",
        )
    )
    for place, bar in enumerate(bars):
        if bar.low is not None and bar.high is not None:
            error = whiskers([bar.end], [bar.low], [bar.high])
            figure.add_scatter(x=[bar.end], y=[place], mode="none", error_x=error, hoverinfo="skip")
    for place, bar in enumerate(bars):
        if place + 1 < len(bars):
            line = {"color": SOFT, "width": 1, "dash": "dot"}
            figure.add_shape(type="line", x0=bar.end, x1=bar.end, y0=place, y1=place + 1, line=line, layer="below")
        figure.add_annotation(
            text=bar.text,
            x=bar.most,
            y=place,
            xanchor="left",
            xshift=10,
            align="left",
            showarrow=False,
            bgcolor="white",
            font={"size": 13},
        )
    begin, margin = min(bar.least for bar in bars), left_of([bar.name for bar in bars])
    room = bars_end([bar.most - begin for bar in bars], [bar.text for bar in bars], margin, size=13)
    figure.update_xaxes(range=[begin, begin + room], ticksuffix=" ms", nticks=6)
    figure.update_yaxes(
        tickvals=places, ticktext=[bar.name for bar in bars], range=[len(bars) - 0.5, -0.5], showgrid=False
    )
    title = f"Why a {difference.phase} step of {difference.fused.name} differs from {difference.vanilla.name}'s"
    subtitle = in_lines(difference.claim, f"compared: {difference.unit}; thin lines: 95 % intervals over steps")
    return finish(figure, title, subtitle, height=60 + ROW * len(bars), top=8, left=margin)


def difference_table(difference: Difference) -> pd.DataFrame:
    """The parts as text, a row each: ms saved, the interval, and the two figures whose difference the part is."""
    places, parts = difference.places, difference.parts
    return pd.DataFrame(
        {
            "ms saved": [f"{ms:+z.{places}f}" for ms in parts["ms"]],
            "95 % interval": _intervals(parts, places),
            "": parts["note"].tolist(),
        },
        index=parts["name"].tolist(),
    )


def stage_difference_table(difference: Difference) -> pd.DataFrame:
    """The stages as text, a row each: ms of a step of both sides, ms saved with the interval, and the verdict."""
    places, stages = difference.places + 1, difference.by_stage
    return pd.DataFrame(
        {
            difference.vanilla.name: [f"{ms:z.{places}f}" for ms in stages["vanilla_ms"]],
            difference.fused.name: [f"{ms:z.{places}f}" for ms in stages["fused_ms"]],
            "ms saved": [f"{ms:+z.{places}f}" for ms in stages["ms"]],
            "95 % interval": _intervals(stages, places),
            "verdict": [str(verdict) for verdict in stages["verdict"]],
        },
        index=stages.index.rename(None),
    )


def _bars(difference: Difference) -> list[Bar]:
    vanilla, fused, places = difference.vanilla, difference.fused, difference.places

    def whole(side: Side, role: str) -> Bar:
        steps = _small(f"mean of {side.steps} steps" if side.steps > 1 else "one step")
        name = BREAK.join(f"<b>{line}</b>" for line in lines_of(side.name, 13, NAME))
        text = f"<b>{side.mean_ms:.{places}f} ms</b><br>{steps}"
        return Bar(name, 0.0, side.mean_ms, None, None, SIDE_COLORS[role], text)

    bars, reached = [whole(vanilla, BASELINE)], vanilla.mean_ms
    for part in difference.shown_parts.itertuples():
        change = f"<b>{-part.ms:+z.{places}f} ms</b> {_interval(-part.high_ms, -part.low_ms, places)}"
        text = BREAK.join([change, *map(_small, lines_of(part.note, 12, NOTE))])
        known, color = not pd.isna(part.low_ms), SAVED if part.ms > 0 else COST
        low, high = (reached - part.high_ms, reached - part.low_ms) if known else (None, None)
        bars.append(Bar(folded(part.name, NAME), reached, reached - part.ms, low, high, color, text))
        reached -= part.ms
    return [*bars, whole(fused, CANDIDATE)]


def _intervals(frame: pd.DataFrame, places: int) -> list[str]:
    return [_interval(low, high, places) for low, high in zip(frame["low_ms"], frame["high_ms"], strict=True)]


def _interval(low: float, high: float, places: int) -> str:
    return "" if pd.isna(low) else f"[{low:+z.{places}f}, {high:+z.{places}f}]"


def _small(text: str) -> str:
    return f'<span style="font-size:12px;color:{SOFT}">{text}</span>'
