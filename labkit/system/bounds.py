"""Bounds of numbers by the names of their settings: one table for the command line, functions and notebooks.

Narrower bounds of a model or a machine are checked where the model or the machine is known.
"""

from __future__ import annotations

import os
from numbers import Integral, Real
from typing import Any, NamedTuple

from labkit.system.errors import UserError


class SettingBounds(NamedTuple):
    """The smallest and the largest value of a setting."""

    least: float
    most: float
    whole: bool = True  # only whole numbers
    above: bool = False  # `least` itself is too small
    zero: bool = False  # 0 is allowed, too
    less: str = ""  # what to do for less than `least`, as the end of the message

    def check(self, name: str, number: Any, why: str = "") -> None:
        """Raises UserError for a number outside these bounds, for NaN, for a fraction where a whole number is due, and
        for anything that is not a number.
        """
        is_number = isinstance(number, Real) and not isinstance(number, bool)
        if not is_number:
            raise UserError(f"got {name} = {number!r}, expected a number")
        if self.zero and number == 0:
            return
        if number != number:  # NaN
            expected = "a number"
        elif number < self.least or (self.above and number == self.least):
            expected = f"{'more than' if self.above else 'at least'} {self.least:g}{self.less}"
        elif number > self.most:
            expected = f"at most {self.most:,}"
        elif self.whole and not isinstance(number, Integral):
            expected = "a whole number"
        else:
            return
        raise UserError(f"got {name} = {_written(number)}, expected {expected}{f' ({why})' if why else ''}")


MOST_WRITTEN = 10**300
MOST_RANKS = 10_000
COUNT = SettingBounds(1, 10_000_000)
RANKS = SettingBounds(1, MOST_RANKS)
AMOUNT = SettingBounds(0, 1_000_000_000, whole=False)
POSITIVE = AMOUNT._replace(above=True)
BOUNDS = {
    "threads": SettingBounds(1, max(256, 4 * (os.cpu_count() or 1))),
    "seed": SettingBounds(0, 2**32 - 2),  # NumPy's generators take up to 2**32 - 1, and prompts use seed + 1
    # The kernels divide logits by the temperature, and quotients beyond float32 are infinite.
    "temperature": SettingBounds(1e-6, 1000, whole=False, zero=True, less=", or 0 for greedy search"),
    "batch": SettingBounds(1, 65_536),
    "warmup": SettingBounds(0, COUNT.most),
    **dict.fromkeys(("rounds", "new", "prompt", "context", "tokens", "window", "stride", "rows"), COUNT),
    **dict.fromkeys(("calls", "layers", "runs", "steps"), COUNT),
    **dict.fromkeys(("tp", "pp", "tp_size", "pp_size", "ranks", "stages", "slots", "nth", "occurrence"), RANKS),
    **dict.fromkeys(("memory_gb", "disk_gb_s", "gflops", "gflop_s"), POSITIVE),
    **dict.fromkeys(("budget_s", "wait_quiet", "wait_quiet_s"), POSITIVE),
    "precision": SettingBounds(0.001, 0.5, whole=False),
    **dict.fromkeys(("resident_gb", "tolerance"), AMOUNT),
}


def check_numbers(**numbers: object) -> None:
    """Checks each number with `check_number` under its name. None stands for a default and passes."""
    for name, number in numbers.items():
        if number is not None:
            check_number(name, number)


def check_number(name: str, number: Any, *, least: float | None = None, why: str = "") -> None:
    """Raises UserError for a number outside of its bounds in BOUNDS.

    least: a lower bound for this use, instead of the one in BOUNDS. why: the reason for it.
    """
    bounds = BOUNDS[name]
    (bounds if least is None else bounds._replace(least=least)).check(name, number, why)


def _written(number: Any) -> str:
    """All digits of a number, but not of one that fills lines."""
    if isinstance(number, Integral):
        return str(number) if abs(int(number)) < MOST_WRITTEN else "a number of more than 300 digits"
    short = f"{number:g}"
    return short if float(short) == number or number != number else str(float(number))
