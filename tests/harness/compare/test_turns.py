"""Sides that differ in threads and ranks, in the same rounds, and what the memory allows them."""

import pytest
from comparisons import comparison

from labkit.harness.compare.interleave import take_turns
from labkit.harness.compare.plan import Schedule, SideSpec, labels
from labkit.harness.compare.versus import comparison_case

SMALL = comparison_case(model="tiny-llama", dtype="float32", batch=1, prompt=9, new=5, threads=1)
ONE, TWO, CUT = SideSpec("fused", 1), SideSpec("fused", 2), SideSpec("fused", 1, tp=2)


def test_memory_allows_nothing_to_sides_of_as_many_cores() -> None:
    one = comparison(threads=1)
    ours = one.candidate.model_copy(update={"case": one.candidate.case.model_copy(update={"tp": 2})})
    more = one.model_copy(update={"candidate": ours})
    assert more.limit_ratio == pytest.approx(1.0)  # the fixture's probes are equal
    faster = tuple(run.model_copy(update={"bandwidth_gb_s": (120.0, 120.0)}) for run in ours.runs)
    ours = ours.model_copy(update={"runs": faster})
    assert one.model_copy(update={"candidate": ours}).limit_ratio == pytest.approx(2.0, rel=0.01)
    theirs = one.baseline.model_copy(update={"case": one.baseline.case.model_copy(update={"threads": 2})})
    assert one.model_copy(update={"candidate": ours, "baseline": theirs}).limit_ratio == 1.0


def test_equal_sides_keep_their_name() -> None:
    assert labels((ONE, ONE)) == ["fused", "fused"]
    assert labels((SideSpec("hf-eager", 2), CUT)) == ["hf-eager", "fused-tp2"]


@pytest.mark.parametrize(
    ("side", "message"),
    [
        (SideSpec("fused", 1, tp=0), "got tp = 0, expected at least 1"),
        (SideSpec("hf-eager", 1, tp=2), "expected a side that can be cut: fused, fused-int8, "),
        (SideSpec("fused", 1, tp=8), "use tp_size <= 4"),
    ],
)
def test_what_cannot_be_cut_is_refused(side: SideSpec, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        take_turns((ONE, side), SMALL, Schedule(rounds=2))
