"""Bars: a bar is the value that a figure has to reach. A check says whether it does."""

from __future__ import annotations

from dataclasses import dataclass

from labkit.statistics import Ratio


@dataclass(frozen=True)
class BarUnit:
    """The formats of a figure and of its bar."""

    figure: str
    bar: str


TIMES = BarUnit("{:.2f}x", "{:g}x")
SHARE = BarUnit("{:.0%}", "{:.0%}")
MS = BarUnit("{:.2f} ms", "{:g} ms")
US = BarUnit("{:.1f} µs", "{:g} µs")
SECONDS = BarUnit("{:.2f} s", "{:g} s")
GIB = BarUnit("{:.2f} GiB", "{:g} GiB")
POINTS = BarUnit("{:.1f} points", "{:g} points")  # between two shares in percent
NOT_TRUSTED = ", not trustworthy"  # follows such a ratio, and its bar


@dataclass(frozen=True)
class BarCheck:
    """The check of one figure against its bar."""

    what: str  # the name of the figure
    figure: str
    bar: str
    met: bool
    close: bool = False  # the bar lies within the figure's interval, so another run might decide otherwise
    possible: float | None = None  # the largest figure that the memory allows, if it is below the bar
    trusted: bool = True  # whether the figure is trustworthy

    def __str__(self) -> str:
        verdict = f"{self.bar}: {'met' if self.met else 'missed'}{', within the interval' if self.close else ''}"
        verdict += "" if self.trusted else NOT_TRUSTED
        return verdict if self.possible is None else f"{verdict}; at the limit it would be {self.possible:.2f}x"


def at_least(
    what: str,
    figure: Ratio | float,
    bar: float,
    unit: BarUnit = TIMES,
    *,
    written: str | None = None,
    possible: float | None = None,
    trusted: bool = True,
) -> BarCheck:
    """Checks that a figure, or the value of a ratio, is at least `bar`. `written`: the bar in words."""
    value, low, high = _interval(figure)
    words = written or unit.bar.format(bar)
    return BarCheck(what, _written(figure, unit), f"≥ {words}", value >= bar, low < bar <= high, possible, trusted)


def at_most(
    what: str, figure: Ratio | float, bar: float, unit: BarUnit = TIMES, *, written: str | None = None
) -> BarCheck:
    """Checks that a figure, or the value of a ratio, is at most `bar`. `written`: the bar in words."""
    value, low, high = _interval(figure)
    words = written or unit.bar.format(bar)
    return BarCheck(what, _written(figure, unit), f"≤ {words}", value <= bar, low <= bar < high)


def short_of(bar: float, ratio: Ratio, share: float | None) -> float | None:
    """The ratio that the candidate would have at the limit, if even this ratio is below the bar; else None.

    `share`: the candidate's share of the limit.
    """
    return ratio.value / share if share and max(ratio.value, ratio.value / share) < bar else None


def _interval(figure: Ratio | float) -> tuple[float, float, float]:
    return (figure.value, figure.low, figure.high) if isinstance(figure, Ratio) else (figure, figure, figure)


def _written(figure: Ratio | float, unit: BarUnit) -> str:
    if not isinstance(figure, Ratio):
        return unit.figure.format(figure)
    low, high = (unit.figure.format(end).rstrip("x") for end in (figure.low, figure.high))
    return f"{unit.figure.format(figure.value)} [{low}, {high}]"
