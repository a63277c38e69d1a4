"""Ranks wait for each other before they compute. A rank that fails before that says why, and none waits for it."""

from concurrent.futures import ThreadPoolExecutor
from itertools import product

import pytest
import torch.distributed as dist

from labkit.kernels.other_ranks import RankFailedError
from labkit.launcher.joining import joining
from labkit.launcher.meeting import TORCHRUN, meet

RANKS = 3


@pytest.mark.parametrize("failing", [*product([False, True], repeat=RANKS)])
def test_every_rank_that_comes_hears_of_the_first_that_failed_and_the_next_attempt_begins_anew(
    failing: tuple[bool, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = dist.HashStore()
    monkeypatch.setattr(dist, "rendezvous", lambda *where, **limits: iter([(store, 0, RANKS)]))

    def come(rank: int) -> str:
        try:
            meet(store, rank, RANKS, 30)
        except RankFailedError as error:
            return str(error)
        return "met"

    failed = [rank for rank in range(RANKS) if failing[rank]]
    for rank in failed:
        for name, value in zip(TORCHRUN, (str(rank), str(RANKS), "localhost", "1"), strict=True):
            monkeypatch.setenv(name, value)
        with pytest.raises(OSError, match="no file"), joining(None):
            raise OSError(f"no file on {rank}")
    outcome = f"rank {failed[0]}: OSError: no file on {failed[0]}" if failed else "met"
    with ThreadPoolExecutor(RANKS) as threads:
        coming = [threads.submit(come, rank) for rank in range(RANKS) if rank not in failed]
        assert [rank.result(20) for rank in coming] == [outcome] * len(coming)
        assert [*threads.map(come, range(RANKS))] == ["met"] * RANKS


def test_outside_of_a_run_a_failure_is_raised_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in TORCHRUN:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(dist, "rendezvous", lambda *where, **limits: pytest.fail("there is no store to look for"))
    with pytest.raises(OSError, match="no file"), joining(None):
        raise OSError("no file")
