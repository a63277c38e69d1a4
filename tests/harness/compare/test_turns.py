"""Sides with different threads and ranks in the same rounds, and the ratio that the memory allows."""

import pytest
from helpers.studies.comparisons import comparison

from labkit.harness.compare.compare import comparison_case
from labkit.harness.compare.interleave import take_turns
from labkit.harness.compare.plan import Schedule, SideSpec, labels

SMALL = comparison_case(model="tiny-llama", dtype="float32", batch=1, prompt=9, new=5, threads=1)
ONE, CUT = SideSpec("fused", 1), SideSpec("fused", 1, tp=2)


def test_sides_of_equally_many_cores_have_a_limit_ratio_of_1() -> None:
    record = comparison(threads=1)
    candidate = record.candidate.model_copy(update={"case": record.candidate.case.model_copy(update={"tp": 2})})
    two_ranks = record.model_copy(update={"candidate": candidate})
    assert two_ranks.limit_ratio == pytest.approx(1.0)  # both sides have the same probes
    faster = tuple(run.model_copy(update={"bandwidth_gb_s": (120.0, 120.0)}) for run in candidate.runs)
    candidate = candidate.model_copy(update={"runs": faster})
    assert record.model_copy(update={"candidate": candidate}).limit_ratio == pytest.approx(2.0, rel=0.01)
    baseline = record.baseline.model_copy(update={"case": record.baseline.case.model_copy(update={"threads": 2})})
    assert record.model_copy(update={"candidate": candidate, "baseline": baseline}).limit_ratio == 1.0


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
