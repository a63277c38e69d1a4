"""Bars: each holds a figure against what it has to reach, and says whether it does."""

from __future__ import annotations

from dataclasses import dataclass

from labkit.statistics import Ratio


@dataclass(frozen=True)
class BarUnit:
    """The formats in which a figure and the bar beside it are written."""

    figure: str
    bar: str


TIMES = BarUnit("{:.2f}x", "{:g}x")
SHARE = BarUnit("{:.0%}", "{:.0%}")
MS = BarUnit("{:.2f} ms", "{:g} ms")
US = BarUnit("{:.1f} µs", "{:g} µs")
SECONDS = BarUnit("{:.2f} s", "{:g} s")
GIB = BarUnit("{:.2f} GiB", "{:g} GiB")
POINTS = BarUnit("{:.1f} points", "{:g} points")  # between two shares in percent
NOT_TRUSTED = ", not trustworthy"  # behind a ratio that is not, and behind its bar


@dataclass(frozen=True)
class BarCheck:
    """A figure, the bar that it was held against, and whether it cleared it.

    `close`: the bar lies within the interval of the figure, so another run might decide otherwise. `possible`: the
    greatest figure that the memory allows, where the bar is past it. `trusted`: whether the figure is trustworthy.
    """

    what: str
    figure: str
    bar: str
    met: bool
    close: bool = False
    possible: float | None = None
    trusted: bool = True

    def __str__(self) -> str:
        verdict = f"{self.bar}: {'met' if self.met else 'missed'}{', within the interval' if self.close else ''}"
        verdict += "" if self.trusted else NOT_TRUSTED
        return verdict if self.possible is None else f"{verdict}; at the limit it would be {self.possible:.2f}x"


def at_least(
    what: str,
    found: Ratio | float,
    bar: float,
    unit: BarUnit = TIMES,
    *,
    written: str | None = None,
    possible: float | None = None,
    trusted: bool = True,
) -> BarCheck:
    """Holds a figure, or the median of a ratio, against the least that it may be. `written`: the bar in words."""
    value, low, high = _interval(found)
    words = written or unit.bar.format(bar)
    return BarCheck(what, _figure(found, unit), f"≥ {words}", value >= bar, low < bar <= high, possible, trusted)


def at_most(
    what: str, found: Ratio | float, bar: float, unit: BarUnit = TIMES, *, written: str | None = None
) -> BarCheck:
    """The same against the most that it may be."""
    value, low, high = _interval(found)
    words = written or unit.bar.format(bar)
    return BarCheck(what, _figure(found, unit), f"≤ {words}", value <= bar, low <= bar < high)


def short_of(bar: float, ratio: Ratio, share: float | None) -> float | None:
    """The ratio that the candidate would have at the limit, if even that is below the bar; else None.

    `share` is the share of the limit that the candidate reaches.
    """
    return ratio.value / share if share and max(ratio.value, ratio.value / share) < bar else None


def _interval(found: Ratio | float) -> tuple[float, float, float]:
    return (found.value, found.low, found.high) if isinstance(found, Ratio) else (found, found, found)


def _figure(found: Ratio | float, unit: BarUnit) -> str:
    if not isinstance(found, Ratio):
        return unit.figure.format(found)
    low, high = (unit.figure.format(end).rstrip("x") for end in (found.low, found.high))
    return f"{unit.figure.format(found.value)} [{low}, {high}]"
