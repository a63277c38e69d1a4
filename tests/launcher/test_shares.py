"""Every rank has its own processors; a rank that must not be pinned, or is bound already, is left alone."""

import os
from collections.abc import Iterator

import pytest

from labkit.launcher.shares import PIN, allowed, pin_this_rank, share, threads_each
from labkit.system import processors

ALL = sorted(os.sched_getaffinity(0))
several = pytest.mark.skipif(len(ALL) < 2, reason="one processor can't be shared out")


@pytest.fixture(autouse=True)
def restore_affinity() -> Iterator[None]:
    yield
    for thread in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(thread), ALL)


def rank(local: int, ranks: int, **variables: str) -> dict[str, str]:
    return {"LOCAL_RANK": str(local), "LOCAL_WORLD_SIZE": str(ranks)} | variables


@pytest.mark.parametrize(("processors", "ranks"), [(8, 2), (7, 3), (5, 5), (64, 8), (3, 1)])
def test_shares_are_disjoint_nearly_equal_and_leave_none_idle(processors: int, ranks: int) -> None:
    shares = [share(number, ranks, range(processors)) for number in range(ranks)]
    assert sorted(processor for part in shares for processor in part) == list(range(processors))
    sizes = [len(part) for part in shares]
    assert max(sizes) - min(sizes) <= 1
    assert min(sizes) == processors // ranks


def test_more_ranks_than_processors_have_no_shares_and_one_thread() -> None:
    assert share(0, 3, range(2)) == ()
    assert threads_each(10_000) == 1
    assert threads_each(1) == len(ALL)


def test_allowed_are_all_that_the_system_gives() -> None:
    assert sorted(allowed()) == ALL


@several
def test_a_rank_keeps_to_its_share_with_all_of_its_threads() -> None:
    expected = share(1, 2, allowed())
    assert pin_this_rank(rank(1, 2)) == expected
    bound = [os.sched_getaffinity(int(thread)) for thread in os.listdir("/proc/self/task")]
    assert all(mask == set(expected) for mask in bound)


@several
def test_a_thread_that_ends_meanwhile_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    expected, listed, ended = share(1, 2, allowed()), os.listdir, 1 << 30  # above the number of any thread
    monkeypatch.setattr(os, "listdir", lambda folder: [str(ended), *listed(folder)])
    assert pin_this_rank(rank(1, 2)) == expected
    assert os.sched_getaffinity(0) == set(expected)


@pytest.mark.parametrize(
    "environment",
    [{}, rank(0, 2, **{PIN: "0"}), rank(0, 100_000), rank(0, 2, OMP_NUM_THREADS="100000")],
    ids=["no rank", "told not to", "too many ranks", "more threads than the share"],
)
def test_others_stay_where_they_are(environment: dict[str, str]) -> None:
    assert pin_this_rank(environment) == ()
    assert sorted(os.sched_getaffinity(0)) == ALL


@several
def test_a_rank_that_somebody_has_bound_stays_there() -> None:
    os.sched_setaffinity(0, ALL[:1])
    assert pin_this_rank(rank(0, 1)) == ()


def test_threads_of_ranks_are_within_the_quota_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processors, "_mask_misleads", lambda: False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    for quota, threads in ((None, [8, 4, 1]), (4.0, [4, 2, 1]), (1.0, [1, 1, 1])):
        monkeypatch.setattr(processors, "_quota_here", lambda quota=quota: quota)
        assert [threads_each(ranks) for ranks in (1, 2, 8)] == threads
