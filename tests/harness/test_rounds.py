"""In each round every side has a turn between two probes of its own, in an order that changes."""

from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import count, islice

from labkit.harness.rounds import Turn, probed, random_orders, turns


def recorder(log: list[str], side: int) -> Callable[[int], str]:
    def run(index: int) -> str:
        log.append(f"run {side}")
        return f"{side} in {index}"

    return run


def test_every_side_runs_once_in_each_round_between_its_own_probes() -> None:
    log: list[str] = []
    probes = count(1)

    def probe(side: int) -> float:
        log.append(f"probe {side}")
        return float(next(probes))

    all_turns = list(turns([recorder(log, side) for side in range(3)], range(4), probe=probe))
    assert Counter((turn.round, turn.side) for turn in all_turns) == Counter(
        (number, side) for number in range(4) for side in range(3)
    )
    assert [turn.round for turn in all_turns] == sorted(turn.round for turn in all_turns)
    assert all(turn.result == f"{turn.side} in {turn.round}" for turn in all_turns)
    assert log == [
        entry for turn in all_turns for entry in (f"probe {turn.side}", f"run {turn.side}", f"probe {turn.side}")
    ]
    assert [(turn.before, turn.after) for turn in all_turns] == [(2 * n + 1, 2 * n + 2) for n in range(12)]


def test_the_order_changes_from_round_to_round_and_follows_the_seed() -> None:
    first, again, of_other_seed = (list(islice(random_orders(4, seed=seed), 8)) for seed in (1, 1, 2))
    assert first == again != of_other_seed
    assert len({tuple(order) for order in first}) > 1
    assert all(sorted(order) == list(range(4)) for order in first)


def test_endless_rounds_start_only_the_requested_turns() -> None:
    log: list[str] = []
    endless = turns([recorder(log, side) for side in range(2)], count(), probe=lambda side: None)
    all_turns = list(islice(endless, 6))
    assert len(log) == 6
    assert {turn.round for turn in all_turns} == {0, 1, 2}
    assert Turn(all_turns[-1].result, None, None, round=2, side=all_turns[-1].side) == all_turns[-1]


def test_a_call_is_probed_before_and_after() -> None:
    probes = iter((10.0, 30.0))
    call = probed(lambda: "done", partial(next, probes))
    assert (call.result, call.before, call.after) == ("done", 10, 30)
