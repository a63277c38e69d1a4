"""Epochs of calls in one process: each side and the probe in each round, new memory, looks and interrupts."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from labkit.harness.compare.plan import Schedule
from labkit.harness.roofline import ONLY_WAY, Rates
from labkit.harness.turns import calls as module
from labkit.harness.turns.calls import CallEpochs, CallRounds
from labkit.harness.turns.looks import FEWEST_PAIRS, MOST_PAIRS
from labkit.harness.turns.placing import PlacedBytes

UNTIL_ANSWERED = Schedule(rounds=None, budget_s=1e9)


@pytest.fixture(autouse=True)
def probe_in_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves the probe's memory where it is, because copying it takes longer than all calls of an epoch."""
    monkeypatch.setattr(module, "place_probe_anew", lambda: None)


def sides(order: list[str]) -> list[Callable[[], int]]:
    """Three sides, which note their turns and return their number."""

    def call(number: int) -> int:
        order.append(str(number))
        return number

    return [lambda number=number: call(number) for number in range(3)]  # type: ignore[misc]


def test_a_round_has_each_side_and_a_probe_in_random_order() -> None:
    order: list[str] = []

    def probe() -> Rates:
        order.append("probe")
        return {ONLY_WAY: 20.0}

    measured = CallEpochs(sides(order), (), probe=probe).run(Schedule(rounds=4))
    rounds = [tuple(order[begin : begin + 4]) for begin in range(0, len(order), 4)]
    assert all(sorted(turns) == ["0", "1", "2", "probe"] for turns in rounds)
    assert len(set(rounds)) > 10  # of the 24 orders, in 16 rounds or more
    assert len(rounds) == 1 + len(measured.results)  # one to warm up
    assert set(measured.results) == {(0, 1, 2)}
    assert measured.bandwidth_gb_s == (20.0,) * len(measured.results)


def test_a_fixed_number_of_epochs_has_no_looks() -> None:
    measured = CallEpochs(sides([]), ()).run(Schedule(rounds=3))
    counts = np.bincount(measured.epochs)
    assert len(counts) == 3
    assert all(FEWEST_PAIRS <= count <= MOST_PAIRS for count in counts)
    assert measured.looks == ()
    assert measured.bandwidth_gb_s is None
    assert list(measured.epochs) == sorted(measured.epochs)
    assert measured.epoch_centres(np.asarray(measured.epochs)) == [0, 1, 2]


def test_epochs_are_added_until_they_answer_the_question() -> None:
    asked: list[int] = []

    def answered(rounds: CallRounds[int]) -> bool:
        asked.append(rounds.epochs[-1] + 1)
        return len(asked) == 3

    labels: list[str] = []
    measured = CallEpochs(sides([]), ()).run(
        UNTIL_ANSWERED,
        answered=answered,
        words=lambda rounds: f"after {rounds.epochs[-1] + 1}",
        progress=lambda done, total, label: labels.append(label),
    )
    assert measured.looks == tuple(asked) == (3, 4, 6)
    assert labels[:4] == ["warming up", "epoch 1", "epoch 2", "epoch 3"]
    assert labels[4:] == ["epoch 4: after 3", "epoch 5: after 4", "epoch 6: after 5", "done"]


def test_a_spent_budget_ends_it_after_the_fewest_epochs() -> None:
    measured = CallEpochs(sides([]), ()).run(Schedule(rounds=None, budget_s=1e-9), answered=lambda rounds: False)
    assert measured.looks == (3,)


def test_all_weights_are_placed_anew_before_each_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    weights, order, placed = torch.zeros(3), [], []  # type: ignore[var-annotated]

    def place(tensors: tuple[torch.Tensor, ...]) -> PlacedBytes:
        placed.append(len(order))
        assert tensors == (weights,)
        return PlacedBytes(12, 12)

    monkeypatch.setattr(module, "place_anew", place)
    measured = CallEpochs(sides(order), (weights,), after=lambda: order.append("after")).run(Schedule(rounds=3))
    assert measured.placed_anew
    assert len(placed) == 3
    assert [order[begin - 1] == "after" for begin in placed] == [False, True, True]
    assert order[-1] == "after"


@pytest.mark.parametrize("moved", [0, 10])
def test_one_epoch_with_weights_in_their_old_place_is_said(monkeypatch: pytest.MonkeyPatch, moved: int) -> None:
    places = iter([PlacedBytes(12, 12), PlacedBytes(moved, 12), PlacedBytes(12, 12)])
    monkeypatch.setattr(module, "place_anew", lambda tensors: next(places))
    assert not CallEpochs(sides([]), ()).run(Schedule(rounds=3)).placed_anew


@pytest.mark.parametrize("interrupted_in", [1, 2, 3, 6])
def test_an_interrupt_keeps_whole_epochs(monkeypatch: pytest.MonkeyPatch, interrupted_in: int) -> None:
    begun = []

    def place(tensors: object) -> PlacedBytes:
        begun.append(tensors)
        if len(begun) == interrupted_in:
            raise KeyboardInterrupt
        return PlacedBytes(1, 1)

    monkeypatch.setattr(module, "place_anew", place)
    epochs = CallEpochs(sides([]), ())
    if interrupted_in < 3:
        with pytest.raises(KeyboardInterrupt):
            epochs.run(UNTIL_ANSWERED, answered=lambda rounds: False)
        return
    measured = epochs.run(UNTIL_ANSWERED, answered=lambda rounds: False)
    assert measured.interrupted
    assert measured.epochs[-1] == interrupted_in - 2
    assert measured.looks[-1] == interrupted_in - 1
    assert len(measured.epochs) == len(measured.results)
