"""Every machine of a run learns why the run ends and which machine was lost."""

import time
from collections.abc import Callable, Iterator
from threading import Thread

import pytest
import torch.distributed as dist

from labkit.launcher import machines
from labkit.launcher.loopback import ADDRESS, loopback_store
from labkit.launcher.machines import Machines

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> dist.TCPStore:
    monkeypatch.setattr(machines, "BEAT_S", 0.01)
    monkeypatch.setattr(machines, "SILENT_S", 0.5)
    monkeypatch.setattr(machines, "REACH_S", 5.0)
    return loopback_store()


@pytest.fixture
def both(store: dist.TCPStore) -> Iterator[tuple[Machines, Machines]]:
    """Two machines that have heard of each other."""
    pair = machine(store, has_store=True), machine(store)
    until(lambda: all(len(member._heard) == 2 for member in pair))
    yield pair
    for member in pair:
        member.leave()


def machine(store: dist.TCPStore, has_store: bool = False) -> Machines:
    return Machines(ADDRESS, store.port, 2, has_store=has_store, join_s=10)


def until(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.005)


def test_the_first_cause_is_told_to_all(both: tuple[Machines, Machines]) -> None:
    first, second = both
    assert (first.reported, first.lost(0.0)) == (None, None)
    telling = Thread(target=first.tell, args=["rank 0 failed"])  # tell() waits until the other machine has heard it
    telling.start()
    until(lambda: second.reported is not None)
    assert second.lost(0.0) == "rank 0 failed"
    assert second.tell("rank 1 lost its connection") == "rank 0 failed"
    telling.join()
    assert second.hear() == "rank 0 failed"


def test_a_machine_that_falls_silent_is_named(both: tuple[Machines, Machines]) -> None:
    first, second = both
    second.leave()
    until(lambda: first.reported is not None)
    assert first.reported == f"error: the machine {second.name} has not been heard of for 0 s"


def test_a_machine_that_said_that_it_pauses_is_not_lost(both: tuple[Machines, Machines]) -> None:
    first, second = both
    second.pause()
    until(lambda: first._somebody_pauses)
    second.leave()
    beats = first._beats
    until(lambda: first._beats > beats + 60)
    assert first.reported is None


def test_a_store_that_is_lost_is_named(both: tuple[Machines, Machines]) -> None:
    """The machine of the store has stopped, so that no round ends any more."""
    first, _ = both
    first.leave()
    first._pulse.join()
    causes = [first.lost(0.25) for _ in range(4)]
    assert causes[:2] == [None, None]
    assert "the machine of the rendezvous 127.0.0.1:" in str(causes[-1])
    assert Machines(ADDRESS, 1, 2, has_store=False, join_s=0.1).tell("why") == "why"


def test_nothing_is_told_where_nothing_is_known(store: dist.TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machines, "REACH_S", 0.1)
    alone = machine(store)
    assert alone.hear() is None
    alone.leave()
