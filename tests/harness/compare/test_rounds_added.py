"""Rounds are added until there is a verdict or the budget is spent. The tests start no process."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.studies.comparisons import comparison

from labkit.harness.compare import whole_runs as module
from labkit.harness.compare.plan import Schedule, SideSpec
from labkit.harness.compare.sampling import Steps, Turns, last_is_decided
from labkit.harness.compare.whole_runs import WholeRuns
from labkit.harness.rounds import Turn
from labkit.harness.turns import looks
from labkit.statistics.sequential import ROUNDS


class Recorded:
    """A side whose runs come from a record."""

    def __init__(self, role: str) -> None:
        self._side = getattr(comparison(rounds=120), role)
        self.name, self.spec = self._side.name, SideSpec(self._side.name, 1)
        self.process = SimpleNamespace(pids=())
        self.tokens: list[Any] = []
        self.ran: list[int] = []

    def run(self, index: int) -> list[dict[str, Any]]:
        return [{"index": index}]

    def note(self, turn: Turn[list[dict[str, Any]]]) -> None:
        self.ran.append(turn.round)
        self.tokens.append([[1, 2, 3]])

    def measurement(self, others_cores: list[float | None]) -> Any:
        assert len(others_cores) == len(self.ran)
        return self._side.model_copy(update={"runs": self._side.runs[: len(self.ran)]})


def rounds(
    monkeypatch: pytest.MonkeyPatch, schedule: Schedule, decided: Any, *roles: str
) -> tuple[Turns, list[tuple[float, float, str]]]:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(module, "probe_bandwidth", lambda threads, device: None)
    reported: list[tuple[float, float, str]] = []
    total = len(roles) * schedule.least(ROUNDS)
    steps = Steps(total, lambda done, all_, label: reported.append((done, all_, label)))
    sides: Any = [Recorded(role) for role in roles]
    run = WholeRuns(sides, schedule, decided, steps, why_rounds="they cannot pause")
    run.run()
    return run.result(), reported


def test_without_a_budget_there_are_as_many_rounds_as_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    turns, reported = rounds(monkeypatch, Schedule(rounds=3), last_is_decided, "baseline", "candidate")
    assert [len(side.runs) for side in turns.sides] == [3, 3]
    assert turns.looks == ()
    assert turns.comparison(0, 1).why_rounds == "they cannot pause"
    assert reported[-1][2].startswith("round 3 of 3: ")


def test_rounds_are_added_until_it_is_decided(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []

    def at_the_third_look(turns: Turns) -> bool:
        looks.append(len(turns.sides[0].runs))
        return len(looks) == 3

    turns, reported = rounds(monkeypatch, Schedule(rounds=4, budget_s=1e9), at_the_third_look, "baseline", "candidate")
    assert turns.looks == (8, 11, 15) == tuple(looks)
    assert [len(side.runs) for side in turns.sides] == [15, 15]
    assert [done for done, _, _ in reported] == list(range(30))
    assert all(done < total for done, total, _ in reported)


def test_a_clear_difference_needs_no_second_look(monkeypatch: pytest.MonkeyPatch) -> None:
    turns, _ = rounds(monkeypatch, Schedule(rounds=10, budget_s=1e9), last_is_decided, "baseline", "candidate")
    assert turns.looks == (10,)
    assert turns.comparison(0, 1).verdict == "FASTER"


def test_a_spent_budget_ends_it_at_whole_rounds_that_are_enough_for_a_look(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(1000))
    for place in (module, looks):
        monkeypatch.setattr(place, "monotonic", lambda: float(next(clock)))
    never: Any = lambda turns: False  # noqa: E731
    turns, _ = rounds(monkeypatch, Schedule(rounds=7, budget_s=0.5), never, "baseline", "candidate")
    assert turns.looks == (8,)  # a look needs 8 rounds, although the first one spent the budget
    turns, _ = rounds(monkeypatch, Schedule(rounds=7, budget_s=6.0), never, "baseline", "candidate")
    assert len(turns.sides[0].runs) == turns.looks[-1]


def test_all_comparisons_with_the_last_side_have_to_be_decided() -> None:
    enough, few = comparison(), comparison(rounds=3)
    tokens = [[[1, 2, 3]]]
    assert last_is_decided(Turns((enough.baseline, enough.candidate), (tokens, tokens)))
    assert not last_is_decided(Turns((few.baseline, few.candidate), (tokens, tokens)))
    wavering = [
        run.model_copy(update={"decode_ms": tuple(step * (1 + 0.06 * (-1) ** run.round) for step in run.decode_ms)})
        for run in enough.candidate.runs
    ]
    itself = enough.candidate.model_copy(update={"runs": tuple(wavering)})
    unclear = Turns((enough.baseline, itself, enough.candidate), (tokens, tokens, tokens), looks=(8,))
    assert [unclear.comparison(index, -1).verdict for index in (0, 1)] == ["FASTER", "UNDECIDED"]
    assert not last_is_decided(unclear)
