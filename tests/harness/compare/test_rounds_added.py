"""Rounds are added until it is decided or the budget is spent, without a process being started."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from comparisons import comparison

from labkit.harness.compare import interleave as module
from labkit.harness.compare.interleave import Turns, last_is_decided
from labkit.harness.compare.plan import Schedule, SideSpec
from labkit.harness.rounds import Turn


class Recorded:
    """A participant whose runs come from a record."""

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
    said: list[tuple[float, float, str]] = []
    total = len(roles) * schedule.first_rounds
    steps = module._Steps(total, lambda done, all_, label: said.append((done, all_, label)))
    run = module._Rounds([Recorded(role) for role in roles], schedule, decided, steps)  # type: ignore[misc]
    run.run()
    return run.result(), said


def test_without_a_budget_there_are_as_many_rounds_as_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    found, said = rounds(monkeypatch, Schedule(rounds=3), last_is_decided, "baseline", "candidate")
    assert [len(side.runs) for side in found.sides] == [3, 3]
    assert found.looks == ()
    assert said[-1][2].startswith("round 3 of 3: ")


def test_rounds_are_added_until_it_is_decided(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def at_the_third_look(found: Turns) -> bool:
        seen.append(len(found.sides[0].runs))
        return len(seen) == 3

    found, said = rounds(monkeypatch, Schedule(rounds=4, budget_s=1e9), at_the_third_look, "baseline", "candidate")
    assert found.looks == (8, 11, 15) == tuple(seen)
    assert [len(side.runs) for side in found.sides] == [15, 15]
    assert [done for done, _, _ in said] == list(range(30))
    assert all(done < total for done, total, _ in said)


def test_a_clear_difference_needs_no_second_look(monkeypatch: pytest.MonkeyPatch) -> None:
    found, _ = rounds(monkeypatch, Schedule(rounds=10, budget_s=1e9), last_is_decided, "baseline", "candidate")
    assert found.looks == (10,)
    assert found.comparison(0, 1).verdict == "FASTER"


def test_a_spent_budget_ends_it_at_whole_rounds_that_are_enough_for_a_look(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter(range(1000))
    monkeypatch.setattr(module, "monotonic", lambda: float(next(now)))
    never: Any = lambda found: False  # noqa: E731
    found, _ = rounds(monkeypatch, Schedule(rounds=7, budget_s=0.5), never, "baseline", "candidate")
    assert found.looks == (8,)  # though the budget was spent after the first round
    found, _ = rounds(monkeypatch, Schedule(rounds=7, budget_s=6.0), never, "baseline", "candidate")
    assert len(found.sides[0].runs) == found.looks[-1]


def test_all_comparisons_with_the_last_side_have_to_be_decided() -> None:
    one, few = comparison(), comparison(rounds=3)
    tokens = [[[1, 2, 3]]]
    assert last_is_decided(Turns((one.baseline, one.candidate), (tokens, tokens)))
    assert not last_is_decided(Turns((few.baseline, few.candidate), (tokens, tokens)))
    wavering = [
        run.model_copy(update={"decode_ms": tuple(step * (1 + 0.06 * (-1) ** run.round) for step in run.decode_ms)})
        for run in one.candidate.runs
    ]
    itself = one.candidate.model_copy(update={"runs": tuple(wavering)})
    unclear = Turns((one.baseline, itself, one.candidate), (tokens, tokens, tokens), looks=(8,))
    assert [unclear.comparison(which, -1).verdict for which in (0, 1)] == ["FASTER", "UNDECIDED"]
    assert not last_is_decided(unclear)
