"""What a check says about the speed of a kernel."""

import pytest

from labkit.harness.judge.judge import Speed
from labkit.notebooks.workshop.kernel_check import Goal, speed_remarks
from labkit.statistics.ratios import Ratio

GAIN, SHARE = 1.3, 0.8


def remark(goal: Goal, value: float, low: float, high: float) -> tuple[bool, bool]:
    """Whether a kernel with this ratio, or share, reaches the goal, and whether it is to be checked again."""
    ratio = Ratio(value, low, high, noise=0.01)
    (only,) = speed_remarks(Speed(1e-3, ratio, ratio, 20.0), goal)
    return only.right, "check again" in only.text


@pytest.mark.parametrize(
    ("interval", "reached", "again"),
    [
        ((1.5, 1.4, 1.6), True, False),
        ((1.2, 1.1, 1.3), False, False),
        ((1.0, 0.9, 1.1), False, False),
        ((1.35, 0.95, 1.86), False, True),  # above the goal, but perhaps slower
        ((1.8, 1.2, 3.4), False, True),
    ],
)
def test_a_gain_counts_if_its_interval_decides(
    interval: tuple[float, float, float], *, reached: bool, again: bool
) -> None:
    assert remark(Goal(lambda rng: [], gain=GAIN), *interval) == (reached, again)


@pytest.mark.parametrize(
    ("interval", "reached", "again"),
    [
        ((0.9, 0.85, 0.95), True, False),
        ((0.75, 0.7, 0.82), True, False),
        ((0.7, 0.65, 0.75), False, False),
        ((0.7, 0.5, 0.85), False, True),
    ],
)
def test_a_share_counts_if_its_interval_reaches_the_goal(
    interval: tuple[float, float, float], *, reached: bool, again: bool
) -> None:
    assert remark(Goal(lambda rng: [], share=SHARE), *interval) == (reached, again)
