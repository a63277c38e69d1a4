"""The figure of epochs shows each epoch, the ratio so far with its interval, and pairs over the rate of the memory."""

from typing import Any

import numpy as np
import pytest
from helpers.studies.comparisons import comparison
from helpers.studies.drawn import annotations

from labkit.figures import epochs_figure
from labkit.harness.comparison import Comparison
from labkit.harness.runs import Run, TokenTurn


def in_epochs(epochs: int = 8, *, looks: tuple[int, ...] = (3, 4, 6, 8), ratio: float = 1.0) -> Comparison:
    """A comparison in epochs of six pairs, whose rate alternates between 30 and 60 GB/s."""
    record, rng = comparison(), np.random.default_rng(epochs)
    sides: dict[str, Any] = {}
    for role, factor in (("baseline", ratio), ("candidate", 1.0)):
        runs = []
        for index in range(epochs):
            turns = [
                TokenTurn(
                    pair=pair, place=pair % 2, at_s=index + pair / 10, first_step_ms=30.0,
                    step_ms=20.0 * factor * float(np.exp(0.01 * rng.standard_normal())),
                    bandwidth_gb_s=60.0 if pair % 2 else 30.0,
                )
                for pair in range(6)
            ]  # fmt: skip
            steps = [turn.step_ms for turn in turns for _ in range(3)]
            runs.append(
                Run.of_epoch(turns, round=index, first_ms=100.0, prompts_ms=[100.0], decode_ms=steps, new_tokens=32)
            )
        sides[role] = getattr(record, role).model_copy(update={"runs": tuple(runs), "placed_anew": True})
    return record.model_copy(update=sides | {"looks": looks})


def trace(figure: Any, name: str) -> Any:
    (found,) = [drawn for drawn in figure.data if drawn.name == name]
    return found


def test_each_epoch_is_a_dot_and_the_band_narrows() -> None:
    record = in_epochs()
    figure = epochs_figure(record)
    dots, line, band = trace(figure, "epoch"), trace(figure, "so far"), trace(figure, "interval")
    assert list(dots.y) == pytest.approx(np.exp(record.logs("per_token")))
    assert list(line.x) == [3, 4, 5, 6, 7, 8]
    assert line.y[-1] == pytest.approx(record.ratio("per_token").value)
    highs, lows = np.array(band.y[:6]), np.array(band.y[6:][::-1])
    assert (highs[-1], lows[-1]) == pytest.approx((record.ratio("per_token").high, record.ratio("per_token").low))
    assert highs[-1] - lows[-1] < highs[0] - lows[0]


def test_the_band_of_a_verdict_of_same_is_shaded_only_near_1() -> None:
    assert len(epochs_figure(in_epochs()).layout.shapes) == 1
    assert len(epochs_figure(in_epochs(ratio=3.0)).layout.shapes) == 0


def test_pairs_stand_over_the_rate_of_the_memory() -> None:
    record = in_epochs()
    pairs = trace(epochs_figure(record), "pair")
    assert set(pairs.x) == {30.0, 60.0}
    assert list(pairs.y) == pytest.approx(np.exp(np.concatenate(record.pair_logs())))


def test_a_fixed_plan_and_a_comparison_in_rounds_are_drawn_too() -> None:
    planned = epochs_figure(in_epochs(looks=()))
    assert list(trace(planned, "so far").x) == [2, 3, 4, 5, 6, 7, 8]
    rounds = epochs_figure(comparison())
    assert len(trace(rounds, "round").y) == 8
    assert [drawn for drawn in rounds.data if drawn.name == "pair"] == []
    assert "Rounds, and the ratio so far" in annotations(rounds)
