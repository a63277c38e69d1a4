"""Epochs: sides and a probe take turns until there is a verdict. Sides here are made up, so no process starts."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from helpers.studies.comparisons import comparison

from labkit.harness import Comparison, load_records, quiet, save
from labkit.harness.compare.plan import Schedule, SideSpec
from labkit.harness.compare.sampling import Steps, Turns, first_is_decided, last_is_decided
from labkit.harness.roofline import ONLY_WAY
from labkit.harness.runs import Run, SharedWeights
from labkit.harness.turns import epochs as module
from labkit.harness.turns import looks
from labkit.harness.turns.epochs import LEAST_PROMPTS, Epochs, why_not
from labkit.harness.turns.looks import FEWEST_PAIRS, FEWEST_STEPS, MOST_PAIRS
from labkit.statistics.resolution import TellsApart
from labkit.studies.comparison_words import notes

NEW, FIRST_MS = 30, 50.0


class MadeUp:
    """A side whose step takes `step_ms` at the place of its weights, which is drawn anew in each epoch."""

    last = 1.0  # time of the last step of a turn, relative to the others

    def __init__(
        self, role: str, step_ms: float, scatter: float = 0.0, *, pauses: bool = True, pauses_to_move: bool = True
    ) -> None:
        self._side = getattr(comparison(), "baseline" if role == "middle" else role)
        self.name, self.spec, self.pauses, self.pauses_to_move = role, SideSpec(role, 1), pauses, pauses_to_move
        self.process = SimpleNamespace(pids=())
        self.tokens: list[Any] = []
        self.runs: list[Run] = []
        self.places, self.asked = 0, []  # type: ignore[var-annotated]
        self.made_ms: list[list[float]] = []  # steps of each turn
        self._step_ms, self._scatter = step_ms, scatter
        self._random = np.random.default_rng(len(role))

    def place(self) -> None:
        self.places += 1
        self._now_ms = self._step_ms * np.exp(self._scatter * self._random.standard_normal())

    def begin(self, seed: int) -> tuple[float, list[list[int]]]:
        self._next = 0
        return FIRST_MS, [[seed]]

    def turn(self, tokens: int) -> tuple[list[float], list[list[int]]]:
        self.asked.append(tokens)
        first = self._next
        self._next += tokens
        assert self._next < NEW  # the prompt's pass gave the first token
        self.made_ms.append([3 * self._now_ms, *[self._now_ms] * (tokens - 2), self.last * self._now_ms])
        return self.made_ms[-1], [[token] for token in range(first, self._next)]

    def note_epochs(self, runs: list[Run], tokens: list[Any]) -> None:
        self.runs, self.tokens = runs, tokens

    def measurement(self, others_cores: list[float | None]) -> Any:
        return self._side.model_copy(update={"runs": tuple(self.runs), "placed_anew": True})


def measured(
    monkeypatch: pytest.MonkeyPatch,
    schedule: Schedule,
    *sides: MadeUp,
    decided: Any = last_is_decided,
    tells_apart: TellsApart | None = None,
    sharing: Any = None,
    place_probe_anew: Callable[[], None] = lambda: None,
) -> tuple[Turns, list[str]]:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(module, "place_probe_anew", place_probe_anew)
    monkeypatch.setattr(module, "probe_turn", lambda threads, device: {ONLY_WAY: 1000.0 * threads})
    labels: list[str] = []
    steps = Steps(9, lambda done, total, label: labels.append(label))
    epochs = Epochs(list(sides), schedule, decided, steps, new_tokens=NEW, tells_apart=tells_apart, sharing=sharing)
    epochs.run()
    return epochs.result(), labels


def test_an_epoch_is_a_sample_of_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MadeUp, "last", 5.0)  # a disturbed step in each turn, which the others outvote
    sides = MadeUp("baseline", 40.0), MadeUp("candidate", 10.0)
    turns, _ = measured(monkeypatch, Schedule(rounds=3), *sides)
    record = turns.comparison(0, 1)
    assert record.in_epochs
    assert (record.unit, record.rounds, record.looks) == ("epoch", 3, ())
    assert record.ratio("per_token").value == pytest.approx(4)  # the slow first step of a turn does not count
    assert record.ratio("ttft").value == pytest.approx(1)
    assert record.ratio("end_to_end").value == pytest.approx((FIRST_MS + (NEW - 1) * 40) / (FIRST_MS + (NEW - 1) * 10))
    assert record.baseline.per_token_ms == pytest.approx(40)
    assert record.tokens_equal
    for side in sides:
        assert side.places == 3
        for run in side.runs:
            assert FEWEST_PAIRS <= len(run.turns) <= MOST_PAIRS
            assert [turn.pair for turn in run.turns] == list(range(len(run.turns)))
            assert {turn.first_step_ms / turn.step_ms for turn in run.turns} == {3.0}
            assert {turn.bandwidth_gb_s for turn in run.turns} == {1000.0}
    assert sides[0].asked == sides[1].asked  # so that the context grows alike on both sides
    assert set(sides[0].asked[1:]) == {4, 5, 6}  # 40 ms of the fastest side, and what a generation leaves


def test_an_epoch_of_whole_calls_has_a_step_at_every_length_of_the_context(monkeypatch: pytest.MonkeyPatch) -> None:
    side = MadeUp("candidate", 40.0)
    turns, _ = measured(monkeypatch, Schedule(rounds=3, whole=True), side)
    steps = NEW - 1
    for run, tokens in zip(turns.sides[0].runs, turns.tokens[0], strict=False):
        begun = len(run.prompts_ms)
        tried = begun * steps - len(run.decode_ms) - len(run.turns)
        assert tried in (0, FEWEST_STEPS)  # the turn that finds the number of steps does not count
        assert run.end_to_end_ms == pytest.approx(FIRST_MS + steps * 40)
        assert len(tokens[0]) == NEW
    assert len(turns.tokens[0]) == sum(len(run.prompts_ms) for run in turns.sides[0].runs)


@pytest.mark.parametrize("pauses_to_move", [True, False])
def test_a_generation_goes_on_in_the_next_epoch_once_there_are_enough_prompts(
    monkeypatch: pytest.MonkeyPatch, pauses_to_move: bool
) -> None:
    monkeypatch.setattr(looks, "MOST_PAIRS", FEWEST_PAIRS)
    sides = MadeUp("baseline", 40.0, pauses_to_move=pauses_to_move), MadeUp("candidate", 10.0)
    turns, _ = measured(monkeypatch, Schedule(rounds=12), *sides)
    record, own = turns.comparison(0, 1), [bool(run.prompts_ms) for run in turns.sides[0].runs]
    assert all(own[:LEAST_PROMPTS])
    assert all(own) is not pauses_to_move
    assert all(run.ttft_ms == FIRST_MS for run in turns.sides[0].runs)
    assert len(record.logs("ttft")) == len(record.baseline.rounds_ms("ttft")) == sum(own)
    assert len(record.logs("per_token")) == record.rounds == 12
    for generation in turns.tokens[0]:
        (row,) = generation
        assert row[1:] == list(range(len(row) - 1))  # the first token is the prompt's
    assert record.tokens_equal


def test_the_order_in_a_pair_is_random_and_the_probe_has_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    turns, _ = measured(monkeypatch, Schedule(rounds=6), MadeUp("baseline", 40.0), MadeUp("candidate", 10.0))
    places = [[turn.place for run in side.runs for turn in run.turns] for side in turns.sides]
    orders = set(zip(*places, strict=True))
    assert orders == {(0, 1), (1, 0), (0, 2), (2, 0), (1, 2), (2, 1)}


def test_the_probe_is_placed_anew_in_each_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    placed: list[int] = []
    sides = MadeUp("baseline", 40.0), MadeUp("candidate", 10.0)
    turns, _ = measured(monkeypatch, Schedule(rounds=4), *sides, place_probe_anew=lambda: placed.append(len(placed)))
    assert len(placed) == turns.comparison(0, 1).rounds == 4


def test_the_record_keeps_every_pair_and_a_file_gives_it_back(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Both times, the probe, the order, the instant and the epoch."""
    sides = MadeUp("baseline", 40.0, 0.1), MadeUp("candidate", 10.0, 0.1)
    turns, _ = measured(monkeypatch, Schedule(rounds=3), *sides)
    (record,) = load_records(save(turns.comparison(0, 1), tmp_path))
    assert isinstance(record, Comparison)
    pairs = record.pairs_frame()
    pd.testing.assert_frame_equal(pairs, turns.comparison(0, 1).pairs_frame(), check_exact=True)
    for side in sides:
        measured_ms = side.made_ms[1:]  # the first turn finds the length of a turn
        assert list(pairs[f"{side.name}_ms"]) == pytest.approx([np.mean(steps) for _, *steps in measured_ms])
        assert list(pairs[f"{side.name}_first_step_ms"]) == [first for first, *_ in measured_ms]
    assert list(pairs["ratio"]) == pytest.approx(list(pairs["baseline_ms"] / pairs["candidate_ms"]))
    assert set(pairs["bandwidth_gb_s"]) == {1000.0}
    assert set(pairs["epoch"]) == {0, 1, 2}
    for _, epoch in pairs.groupby("epoch"):
        assert list(epoch["pair"]) == list(range(len(epoch)))
    in_order = np.sign(pairs["candidate_at_s"] - pairs["baseline_at_s"])
    assert (in_order * (pairs["candidate_place"] - pairs["baseline_place"]) >= 0).all()
    assert set(zip(pairs["baseline_place"], pairs["candidate_place"], strict=True)) <= {
        (ours, theirs) for ours in range(3) for theirs in range(3) if ours != theirs
    }
    assert pairs[["baseline_at_s", "candidate_at_s"]].max(axis=1).is_monotonic_increasing


def test_the_limit_is_that_of_the_contexts_that_were_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """An epoch of three steps at the end of a generation reads longer contexts than its average step."""
    turns, _ = measured(monkeypatch, Schedule(rounds=3), MadeUp("baseline", 40.0), MadeUp("candidate", 10.0))
    further = [turn.further_tokens for run in turns.sides[0].runs for turn in run.turns]
    assert min(further) < 0 < max(further)
    assert all(abs(tokens) <= (NEW - 2) / 2 for tokens in further)
    run, work = turns.sides[0].runs[0], turns.sides[0].work
    assert work is not None
    work = work.model_copy(update={"bytes_per_token": 1e6})
    late = run.model_copy(update={"turns": (run.turns[0].model_copy(update={"further_tokens": 9.0}),)})
    early = run.model_copy(update={"turns": (run.turns[0].model_copy(update={"further_tokens": -9.0}),)})
    more = (late.floor_share(work) or 0) - (early.floor_share(work) or 0)
    assert more == pytest.approx(18 * 1e6 / 1000.0 / 1e6 / run.turns[0].step_ms)  # at 1,000 GB/s
    side = turns.sides[0].model_copy(update={"runs": (early,), "work": work})
    assert side.left_out == pytest.approx(9e6 / work.decode_bytes)


def test_epochs_are_added_until_it_is_decided(monkeypatch: pytest.MonkeyPatch) -> None:
    turns, labels = measured(
        monkeypatch, Schedule(rounds=None, budget_s=1e9), MadeUp("baseline", 40.0, 0.01), MadeUp("candidate", 10.0)
    )
    assert turns.looks == (3,)
    assert turns.comparison(0, 1).verdict == "FASTER"
    assert labels[0] == "epoch 1"


def test_a_side_is_the_same_as_itself_after_some_epochs(monkeypatch: pytest.MonkeyPatch) -> None:
    sides = MadeUp("baseline", 10.0, 0.02), MadeUp("candidate", 10.0, 0.02)
    turns, labels = measured(monkeypatch, Schedule(rounds=None, budget_s=1e9), *sides)
    record = turns.comparison(0, 1)
    assert record.verdict == "SAME"
    assert 6 <= record.rounds == turns.looks[-1] <= 34
    assert record.scatter is not None
    assert 0.01 < record.scatter.placements < 0.05
    assert record.scatter.turns < 0.001
    assert "x [" in labels[-1]  # the ratio so far


def test_a_clear_but_wide_result_goes_on_and_is_trusted_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rate that changes from epoch to epoch makes the figure imprecise, and not doubtful."""
    sides = MadeUp("baseline", 80.0, 0.15), MadeUp("candidate", 10.0)
    turns, _ = measured(monkeypatch, Schedule(rounds=None, budget_s=1e-9), *sides)
    record = turns.comparison(0, 1)
    ratio = record.ratio("per_token")
    assert record.rounds == 3
    assert ratio.high > 1.25 * ratio.low
    assert record.verdict == "FASTER"
    assert record.trust().trustworthy
    assert not last_is_decided(turns)


def test_every_other_side_may_have_to_differ_from_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """The middle side is undecided against the first, although both others are decided."""
    sides = MadeUp("baseline", 40.0), MadeUp("middle", 40.0, 0.3), MadeUp("candidate", 10.0)
    turns, _ = measured(monkeypatch, Schedule(rounds=3), *sides)
    assert turns.comparison(0, 2).verdict == "FASTER"
    assert turns.comparison(0, 1).verdict == "UNDECIDED"
    assert not first_is_decided(turns)
    assert first_is_decided(replace(turns, sides=turns.sides[::2], tokens=turns.tokens[::2]))


def test_a_difference_that_the_machine_does_not_tell_apart_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    schedule, sides = Schedule(rounds=None, budget_s=1e9), (MadeUp("baseline", 10.28), MadeUp("candidate", 10.0))
    alone, _ = measured(monkeypatch, schedule, *sides)
    assert alone.comparison(0, 1).verdict == "FASTER"
    turns, _ = measured(monkeypatch, schedule, *sides, tells_apart=TellsApart(0.035, 60.0))
    record = turns.comparison(0, 1)
    assert record.verdict == "SAME"
    assert record.table().claim is not None
    assert record.table().claim.rest.endswith("a claim needs more than 1.035x")  # type: ignore[union-attr]
    sentence = "this machine tells 3.5% apart in 60 s, so smaller differences count as none"
    assert sentence in record.table().notes
    assert record.as_dict()["tells_apart"] == {"difference": 0.035, "seconds": 60.0}
    assert sentence[1:] in str(notes(record))
    assert Comparison.model_validate_json(record.model_dump_json()) == record


def test_a_precision_goes_on_after_the_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    sides = MadeUp("baseline", 40.0, 0.02), MadeUp("candidate", 10.0, 0.02)
    turns, _ = measured(monkeypatch, Schedule(rounds=None, budget_s=1e9, precision=0.04), *sides)
    ratio = turns.comparison(0, 1).ratio("per_token")
    assert ratio.high / ratio.low <= 1.04
    assert len(turns.looks) > 1


def test_a_spent_budget_ends_it_after_the_fewest_epochs(monkeypatch: pytest.MonkeyPatch) -> None:
    sides = MadeUp("baseline", 10.0, 0.1), MadeUp("candidate", 10.0, 0.1)
    turns, _ = measured(monkeypatch, Schedule(rounds=None, budget_s=1e-9), *sides)
    assert turns.looks == (3,)
    assert turns.comparison(0, 1).verdict == "UNDECIDED"


def test_a_pair_in_which_the_machine_slept_is_dropped_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    slept = iter([0.0] * 7 + [100.0] * 10_000)
    monkeypatch.setattr(module, "time", lambda: module.monotonic() + next(slept))
    turns, _ = measured(monkeypatch, Schedule(rounds=2), MadeUp("baseline", 40.0), MadeUp("candidate", 10.0))
    record = turns.comparison(0, 1)
    assert record.dropped_pairs == 1
    assert "1 pairs of turns were dropped" in " ".join(record.remarks)
    assert all(len(run.turns) >= FEWEST_PAIRS for run in record.candidate.runs)


@pytest.mark.parametrize("interrupted_in", [1, 3, 6])
def test_an_interrupt_keeps_whole_epochs(monkeypatch: pytest.MonkeyPatch, interrupted_in: int) -> None:
    side = MadeUp("candidate", 10.0)
    place = side.place

    def interrupted() -> None:
        place()
        if side.places == interrupted_in:
            raise KeyboardInterrupt

    side.place = interrupted  # type: ignore[method-assign]
    monkeypatch.setattr(Epochs, "_place", lambda epochs: [side.place() for side in epochs.sides])
    schedule = Schedule(rounds=None, budget_s=1e9)
    never: Any = lambda turns: False  # noqa: E731
    if interrupted_in == 1:
        with pytest.raises(KeyboardInterrupt):
            measured(monkeypatch, schedule, MadeUp("baseline", 40.0), side, decided=never)
        return
    turns, _ = measured(monkeypatch, schedule, MadeUp("baseline", 40.0), side, decided=never)
    assert turns.interrupted
    assert [len(measurement.runs) for measurement in turns.sides] == [interrupted_in - 1] * 2
    assert turns.looks[-1] == interrupted_in - 1


def test_a_busy_machine_is_named_while_it_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quiet.OthersByRound, "end_round", lambda others: others.cores.append(9.0))
    monkeypatch.setattr(quiet, "physical_cores", lambda: 9)
    _, labels = measured(monkeypatch, Schedule(rounds=3), MadeUp("baseline", 6.0), MadeUp("candidate", 5.0))
    assert labels[0] == "epoch 1 of 3"
    assert labels[1:3] == [f"epoch {epoch} of 3; other programs take 1.0 of 1 processors" for epoch in (2, 3)]


def test_what_keeps_sides_from_taking_turns_is_said() -> None:
    able: Any = MadeUp("baseline", 1.0)
    stuck: Any = MadeUp("candidate", 1.0, pauses=False)
    assert why_not([able], 20, None) == ""
    assert "candidate cannot pause" in why_not([able, stuck], 20, None)
    assert "limited memory" in why_not([able], 20, 0.5)
    assert "2 new tokens" in why_not([able], FEWEST_STEPS - 1, None)


class Together:
    """Places all sides at once, and shares this much of 100 MB."""

    def __init__(self, sides: tuple[MadeUp, ...], shared_mb: float) -> None:
        self._sides, self.record = sides, SharedWeights(shared_mb=shared_mb, total_mb=100)

    def place(self) -> None:
        for side in self._sides:
            side.place()


@pytest.mark.parametrize(("shared_mb", "limited"), [(100, False), (95, False), (50, True), (0, True)])
def test_the_resolution_of_the_machine_is_about_weights_in_different_places(
    shared_mb: float, limited: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    sides = MadeUp("baseline", 10.0), MadeUp("candidate", 10.0)
    tells = TellsApart(0.04, 60.0)
    turns, _ = measured(monkeypatch, Schedule(rounds=3), *sides, tells_apart=tells, sharing=Together(sides, shared_mb))
    assert [side.places for side in sides] == [3, 3]
    record = turns.comparison(0, 1)
    assert record.shared_weights == SharedWeights(shared_mb=shared_mb, total_mb=100)
    assert record.tells_apart == (tells if limited else None)
