"""A rank counts as stopped if other ranks wait for it and it stays stopped for several looks."""

import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from labkit.launcher.stopped import LOOKS, StoppedRanks, left_in
from labkit.system.process_state import STOPPED, process_state

Processes = list[subprocess.Popen[bytes]]


@pytest.fixture
def ranks() -> Iterator[Processes]:
    processes = [subprocess.Popen(["sleep", "60"]) for _ in range(3)]
    yield processes
    for process in processes:
        process.kill()
        process.wait()


def stop(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGSTOP)
    while process_state(process.pid) != STOPPED:
        time.sleep(0.001)


def stopped_at_each_look(ranks: Processes, *, looks: int = LOOKS, alone: bool = True) -> list[int | None]:
    watch = StoppedRanks(alone=alone)
    return [watch.look({4 + index: rank.pid for index, rank in enumerate(ranks)}) for _ in range(looks)]


def test_a_rank_that_others_wait_for_is_found_at_the_last_look(ranks: Processes) -> None:
    assert stopped_at_each_look(ranks) == [None] * LOOKS
    stop(ranks[1])
    assert stopped_at_each_look(ranks) == [None] * (LOOKS - 1) + [5]


def test_ranks_that_are_stopped_together_are_left_alone_unless_other_machines_wait(ranks: Processes) -> None:
    for rank in ranks:
        stop(rank)
    assert stopped_at_each_look(ranks) == [None] * LOOKS
    assert stopped_at_each_look(ranks, alone=False)[-1] == 4
    ranks[2].kill()
    ranks[2].wait()
    assert stopped_at_each_look(ranks) == [None] * LOOKS


def test_a_rank_that_goes_on_is_no_longer_stopped(ranks: Processes) -> None:
    watch, pids = StoppedRanks(), {index: rank.pid for index, rank in enumerate(ranks)}
    stop(ranks[0])
    assert [watch.look(pids) for _ in range(LOOKS - 1)] == [None] * (LOOKS - 1)
    ranks[0].send_signal(signal.SIGCONT)
    while process_state(ranks[0].pid) == STOPPED:
        time.sleep(0.001)
    assert watch.look(pids) is None
    stop(ranks[0])
    assert watch.look(pids) is None


def test_processes_are_found_by_rank(tmp_path: Path) -> None:
    for name in ("0.17", "12.4000000"):
        (tmp_path / name).touch()
    assert left_in(tmp_path) == {0: 17, 12: 4000000}
