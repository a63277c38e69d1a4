"""The bench of turns, with real processes."""

import pytest
from helpers.sweeps import sweep

from labkit.bench.turns import checks_of
from labkit.harness.compare.compare import comparison_case
from labkit.harness.compare.plan import Schedule, SideSpec, prepare


@sweep
@pytest.mark.parametrize("side", ["fused", "fused-tp2", "hf-eager"])
def test_a_side_has_both_figures_and_sleeps_while_it_is_paused(side: str) -> None:
    case = comparison_case(model="tiny-gpt2", dtype="float32", batch=1, prompt=128, new=512, threads=2)
    spec = SideSpec.named(side, 2)
    cost, paused = checks_of(spec, prepare([spec], case, Schedule()), rounds=2)
    assert cost.figure.endswith("]")
    assert float(paused.figure.removesuffix("%")) < 50, "a side that waits in a loop takes a whole processor"
