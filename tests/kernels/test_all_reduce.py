"""Sums and gathers over ranks: the same bits on all ranks, by each transport; a missing rank is named."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.ranks.meeting_ranks import RANKS, all_answers

import labkit
from labkit.kernels.all_reduce import Exchange, all_reduce

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def answers() -> list[Any]:
    """Answers of each rank, from one run for all tests."""
    return labkit.launch(all_answers, tp_size=RANKS, timeout_s=90)


def test_sums_are_torchs_and_the_same_bits_on_every_rank(answers: list[Any]) -> None:
    first, *others = (totals for totals, _, _ in answers)
    for other in others:
        assert all(a.equal(b) for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize(
    ("raised", "reported"), [(KeyboardInterrupt(), KeyboardInterrupt), (OSError("cut"), RuntimeError)]
)
def test_what_ends_a_meeting_reaches_the_caller(
    raised: BaseException, reported: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C calls the meeting, and exceptions cannot pass through C."""

    def fails(*arguments: object) -> None:
        raise raised

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        exchange = Exchange(None, 4096, transport="gloo")
        monkeypatch.setattr(exchange.gloo, "all_gather", fails)
        with pytest.raises(reported):
            all_reduce(torch.ones(3), exchange, impl="cpp")
    finally:
        dist.destroy_process_group()


def test_a_rank_whose_meeting_failed_no_longer_writes_where_the_others_read(answers: list[Any]) -> None:
    """Other ranks may be slower, and still read its contribution to the last meeting."""
    assert [unchanged for _, unchanged, _ in answers] == [True] * RANKS


def test_a_rank_that_has_ended_or_does_not_come_is_named(answers: list[Any]) -> None:
    ended, late = answers[0][2]
    assert "rank 0: rank 1 has ended" in ended
    assert "rank 0: rank 1 did not come within 0 s" in late
