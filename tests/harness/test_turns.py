"""Sides that differ in threads and ranks, in the same rounds, and what the memory allows them."""

from typing import Any

import pytest
from comparisons import comparison

from labkit.harness.interleave import SideSpec, Turns, labels, take_turns

SMALL: dict[str, Any] = {"model": "tiny-llama", "prompt": 9, "new": 5, "rounds": 2}
ONE, TWO, CUT = SideSpec("fused", 1), SideSpec("fused", 2), SideSpec("fused", 1, ranks=2)


@pytest.fixture(scope="module")
def turns() -> Turns:
    return take_turns((ONE, TWO, CUT), **SMALL)


@pytest.mark.timeout(180)
def test_sides_of_one_name_are_told_apart(turns: Turns) -> None:
    assert [side.name for side in turns.sides] == ["fused, 1 thread", "fused, 2 threads", "fused-tp2"]
    assert [(side.case.threads, side.case.tp) for side in turns.sides] == [(1, 1), (2, 1), (1, 2)]
    assert [side.environment.threads for side in turns.sides] == [1, 2, 2]


@pytest.mark.timeout(180)
def test_all_sides_produce_the_same_tokens_in_as_many_rounds(turns: Turns) -> None:
    for baseline in (0, 1):
        found = turns.comparison(baseline, 2)
        assert found.tokens_equal
        assert len(found.baseline.runs) == len(found.candidate.runs) == SMALL["rounds"]


@pytest.mark.timeout(180)
def test_only_a_side_on_several_ranks_has_stages_of_ranks_and_waits(turns: Turns) -> None:
    assert [len(side.rank_stages) for side in turns.sides] == [0, 0, 2]
    assert [len(side.communication_shares) for side in turns.sides] == [0, 0, 2]
    assert all(0 < share < 1 for share in turns.sides[2].communication_shares)


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
        (SideSpec("fused", 1, ranks=0), "got tp = 0, expected at least 1"),
        (SideSpec("hf-eager", 1, ranks=2), "expected 'fused' or 'fused-int8', which can be cut"),
        (SideSpec("fused", 1, ranks=8), "use tp_size <= 4"),
    ],
)
def test_what_cannot_be_cut_is_refused(side: SideSpec, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        take_turns((ONE, side), **SMALL)
