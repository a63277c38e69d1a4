"""Processor time of other programs is told apart from the measurement's own, and quiet is waited for."""

import os
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import psutil
import pytest

from labkit.harness import quiet as module
from labkit.harness.quiet import NotQuietError, OthersByRound, Program, wait_until_quiet
from labkit.system import others_clock
from labkit.system.errors import UserError
from labkit.system.others_clock import OthersClock


class Machine:
    """A simulated machine; its counters change only in `runs`."""

    def __init__(self) -> None:
        self.now, self.busy, self.idle, self.stolen, self.ours = 0.0, 0.0, 0.0, 0.0, 0.0

    def runs(self, seconds: float, *, others: float = 0.0, ours: float = 0.0, stolen: float = 0.0) -> None:
        self.now += seconds
        self.busy += seconds * (others + ours)
        self.idle += seconds * 0.5
        self.stolen += seconds * stolen
        self.ours += seconds * ours


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    simulated = Machine()
    monkeypatch.setattr(others_clock, "monotonic", lambda: simulated.now)

    def times() -> SimpleNamespace:
        return SimpleNamespace(
            _asdict=lambda: {
                "user": simulated.busy,
                "idle": simulated.idle,
                "steal": simulated.stolen,
                "guest": simulated.busy,
            }
        )

    monkeypatch.setattr(psutil, "cpu_times", times)
    monkeypatch.setattr(others_clock, "_seconds", lambda process: simulated.ours)
    return simulated


def test_the_time_of_the_measurement_is_not_that_of_others(machine: Machine) -> None:
    clock = OthersClock()
    machine.runs(2, others=0.25, ours=1.5)
    assert clock.lap() == pytest.approx(0.25)
    machine.runs(2, ours=2.0)
    assert clock.lap() == pytest.approx(0)


def test_this_process_is_counted_once_if_it_is_named_too(machine: Machine) -> None:
    clock = OthersClock([os.getpid()])
    machine.runs(2, others=0.5, ours=1.0)
    assert clock.lap() == pytest.approx(0.5)


def test_time_that_the_host_of_a_virtual_machine_takes_is_that_of_others(machine: Machine) -> None:
    clock = OthersClock()
    machine.runs(1, ours=1.0, stolen=0.7)
    assert clock.lap() == pytest.approx(0.7)


def test_short_rounds_share_one_figure(machine: Machine) -> None:
    others = OthersByRound()
    for cores in (0.2, 0.4):
        machine.runs(0.5, others=cores)
        others.end_round()
    machine.runs(2, others=1.0)
    others.end_round()
    machine.runs(0.1, others=2.0)
    others.end_round()
    assert others.cores[:3] == pytest.approx([0.3, 0.3, 1.0])
    assert others.cores[3] is None
    others.end()
    assert others.cores[3] == others.cores[2]


def test_the_load_of_a_very_short_measurement_is_unknown(machine: Machine) -> None:
    others = OthersByRound()
    machine.runs(0.01, others=1.0)
    others.end_round()
    others.end()
    assert others.cores == [None]


@pytest.fixture
def samples(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[float]]:
    """Sets how many processors other programs keep busy in each second; returns the list of seconds that remain."""

    def set_samples(*cores: float) -> list[float]:
        remaining, now = list(cores), [0.0]

        def sample(seconds: float) -> tuple[list[Program], float]:
            now[0] += seconds
            taken = remaining.pop(0)
            return ([Program("cc1plus", taken)] if taken else []), taken

        monkeypatch.setattr(module, "_sample", sample)
        monkeypatch.setattr(module, "monotonic", lambda: now[0])
        monkeypatch.setattr(psutil, "cpu_count", lambda logical=True: 2)
        return remaining

    return set_samples


def test_three_quiet_seconds_in_a_row_are_waited_for(samples: Callable[..., list[float]]) -> None:
    labels: list[str] = []
    remaining = samples(1.5, 0.0, 0.05, 0.9, 0.0, 0.02, 0.0, 1.0)
    wait_until_quiet(60, progress=lambda done, total, label: labels.append(label))
    assert remaining == [1.0]
    assert labels[0] == "waiting for a quiet machine: cc1plus (1.5)"
    assert labels[1] == "quiet so far"


def test_programs_that_leave_enough_processors_alone_do_not_matter(samples: Callable[..., list[float]]) -> None:
    samples(1.0, 1.0, 1.0)
    wait_until_quiet(60, needed=1)


def test_a_machine_that_stays_busy_is_refused_with_the_name_of_what_runs(
    samples: Callable[..., list[float]],
) -> None:
    samples(*[1.8] * 10)
    with pytest.raises(NotQuietError, match=r"within 5 s: .* 1\.8 processors busy \(cc1plus \(1\.8\)\); close"):
        wait_until_quiet(5)


def test_no_time_to_wait_is_refused() -> None:
    with pytest.raises(UserError, match="got wait_quiet_s = 0, expected more than 0"):
        wait_until_quiet(0)


def test_the_real_counters_can_be_read() -> None:
    clock = OthersClock([psutil.Process().pid])
    taken = clock.lap(shortest_s=0.0)
    assert taken is None or taken >= 0
    this_process = psutil.Process()
    spent = module._by_process()[this_process.pid]
    assert spent.name == this_process.name()
    assert 0 < spent.seconds <= sum(this_process.cpu_times()[:2])


def test_a_process_that_has_ended_spends_nothing() -> None:
    class Gone:
        def cpu_times(self) -> Iterator[float]:
            raise psutil.NoSuchProcess(1)

    assert others_clock._seconds(Gone()) == 0  # type: ignore[arg-type]


def test_idle_processors_stand_in_for_those_that_others_keep_busy(machine: Machine) -> None:
    clock = OthersClock()
    machine.runs(2, others=0.5, ours=1.0)
    lap = clock.whole_lap()
    assert lap is not None
    assert lap.taken == 0  # half a processor is idle
    machine.runs(2, others=1.25, ours=0.25)
    lap = clock.whole_lap()
    assert lap is not None
    assert lap.taken == pytest.approx(0.75)
