"""A ratio that follows the rate of the memory is found, and no other."""

import numpy as np
import pytest

from labkit.statistics.rates import ratio_by_rate

RNG = np.random.default_rng(5)
RATES = np.concatenate([RNG.normal(36, 1, 60), RNG.normal(60, 2, 60)])
NOISE = RNG.normal(0, 0.03, 120)


def test_both_ends_are_said() -> None:
    found = ratio_by_rate(RATES, np.log(np.where(RATES < 48, 1.27, 1.74)) + NOISE)  # type: ignore[arg-type]
    assert found is not None
    assert found.slow_ratio == pytest.approx(1.27, rel=0.03)
    assert found.fast_ratio == pytest.approx(1.74, rel=0.03)
    assert str(found).startswith("1.2")
    assert "x at 35 GB/s, 1.7" in str(found)


@pytest.mark.parametrize(
    ("rates", "logs"),
    [
        pytest.param(RATES, NOISE, id="no dependence"),
        pytest.param(RATES, np.where(RATES < 48, 0.0, 0.02) + NOISE / 10, id="too small to matter"),
        pytest.param(RATES[:60], np.linspace(0, 0.5, 60), id="one rate"),
        pytest.param(RATES[50:70], np.log(RATES[50:70]), id="few pairs"),
        pytest.param([], [], id="no probe"),
    ],
)
def test_a_ratio_that_does_not_follow_the_rate_has_no_ends(rates: list[float], logs: list[float]) -> None:
    assert ratio_by_rate(rates, logs) is None
