"""Records in epochs are compared over their epochs, at rates of the memory that both had."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.studies.comparisons import in_epochs, measurement
from rich.console import Console

from labkit.harness import Comparison, Measurement, RecordsDiff, Verdict, diff_records
from labkit.harness.diff.changes import Change
from labkit.harness.results import save_lines
from labkit.statistics.resolution import TellsApart

Diff = Callable[..., RecordsDiff]
Rates = list[float]  # of the turns of an epoch


@pytest.fixture
def diff(tmp_path: Path) -> Diff:
    def diff_of(before: Measurement, after: Measurement, **options: Any) -> RecordsDiff:
        files = save_lines(tmp_path / "before.jsonl", [before]), save_lines(tmp_path / "after.jsonl", [after])
        return diff_records(*files, **options)

    return diff_of


def side(
    epochs: list[Rates], *, speed: float = 1.0, follows: float = 1.0, place: float = 0.01, seed: int = 0, **fields: Any
) -> Measurement:
    """A side whose steps take 10 ms at 60 GB/s. Its time follows the rate of each turn, and differs by `place` with the
    place of its weights.
    """
    rng = np.random.default_rng(seed)
    turns = []
    for rates in epochs:
        placed = 10 / speed * np.exp(place * rng.standard_normal())
        turns.append(
            [(placed * (60 / rate) ** follows * np.exp(0.003 * rng.standard_normal()), rate) for rate in rates]
        )
    return in_epochs(measurement("fused"), turns).model_copy(update=fields)


def mixed(slow: int, fast: int, count: int = 8) -> list[Rates]:
    return [[30.0, 30.5] * slow + [60.0, 61.0] * fast] * count


def only(result: RecordsDiff) -> Change:
    (change,) = result.changes
    return change


def test_a_changed_side_is_told_from_an_unchanged_one(diff: Diff) -> None:
    before = side(mixed(2, 2))
    assert only(diff(before, side(mixed(2, 2), seed=1))).verdict is Verdict.SAME
    slower = only(diff(before, side(mixed(2, 2), speed=0.85, seed=1)))
    assert slower.verdict is Verdict.SLOWER
    assert slower.ratio.value == pytest.approx(0.85, rel=0.02)
    assert slower.figures[0] / slower.figures[1] == pytest.approx(slower.ratio.value)
    assert only(diff(side(mixed(2, 2), speed=0.85, seed=1), before)).verdict is Verdict.FASTER


@pytest.mark.parametrize("metric", ["per_token", "end_to_end"])
def test_another_mixture_of_rates_is_not_taken_for_other_code(metric: str, diff: Diff) -> None:
    before, after = side(mixed(1, 3)), side(mixed(3, 1), seed=1)
    medians = [getattr(record, f"{metric}_ms") for record in (before, after)]
    assert medians[1] > 1.4 * medians[0]
    change = only(diff(before, after, metric=metric))
    assert change.verdict is Verdict.SAME
    assert change.figures[1] == pytest.approx(change.figures[0], rel=0.03)
    assert only(diff(before, side(mixed(3, 1), speed=0.85, seed=1), metric=metric)).verdict is Verdict.SLOWER


def test_the_words_say_which_turns_were_used_and_how_far_places_scatter(diff: Diff) -> None:
    result = diff(side(mixed(4, 0)), side(mixed(2, 2), seed=1))
    change = only(result)
    assert change.scatter is not None
    before, after = change.scatter
    assert change.basis == (
        f"at 30 to 30 GB/s, 75% of the turns; between placements ± {before:.1%} before, ± {after:.1%} after"
    )
    assert change.basis in " ".join(str(result).split())
    (case,) = json.loads(json.dumps(result.as_dict(), allow_nan=False))["cases"]
    assert case["at_gb_s"] == [[30.0, 30.5]]
    assert case["turns_used"] == 0.75
    assert case["samples"] == ["epoch", "epoch"]
    assert (case["scatter_before"], case["scatter_after"]) == pytest.approx(change.scatter)
    assert result.to_frame()["turns_used"].tolist() == [0.75]


def test_the_scatter_between_placements_decides_what_is_a_change(diff: Diff) -> None:
    for place, verdict in ((0.003, Verdict.SLOWER), (0.05, Verdict.UNDECIDED)):
        sides = side(mixed(2, 2, 4), place=place), side(mixed(2, 2, 4), place=place, speed=0.92, seed=1)
        assert only(diff(*sides)).verdict is verdict


def test_without_a_common_rate_nothing_is_claimed(diff: Diff) -> None:
    change = only(diff(side(mixed(4, 0)), side(mixed(0, 4), seed=1)))
    assert change.ratio.value > 1.9
    assert change.verdict is Verdict.UNDECIDED
    assert change.trust.why == "memory was read at 30 to 30 GB/s before and 60 to 61 after: no common rate"
    assert change.trust.remedies == ("measure both again, one right after the other",)
    few = only(diff(side(mixed(9, 1)), side(mixed(0, 4), seed=1)))
    assert few.verdict is Verdict.UNDECIDED
    assert "30 to 60 GB/s before and 60 to 61 after: too few turns at common rates" in few.trust.why


def test_two_machines_are_compared_at_all_rates(diff: Diff) -> None:
    change = only(diff(side(mixed(4, 0)), side(mixed(0, 4), seed=1), across_machines=True))
    assert change.verdict is Verdict.FASTER
    assert change.common is None


def test_a_side_that_does_not_follow_the_rate_is_compared_in_all_turns(diff: Diff) -> None:
    before, after = side(mixed(3, 1), follows=0.0, speed=0.2), side(mixed(0, 4), follows=0.0, speed=0.17, seed=1)
    change = only(diff(before, after))
    assert change.common is None
    assert change.verdict is Verdict.SLOWER


def test_a_side_that_multiplies_for_longer_than_it_reads_is_compared_in_all_turns(diff: Diff) -> None:
    """0.25 GFLOP of a step take 50 ms at this peak, and its 0.5 GB take 17 ms at 30 GB/s."""
    fields: dict[str, Any] = {"follows": 0.0, "peak_gflop_s": 5.0}
    change = only(diff(side(mixed(4, 0), speed=0.2, **fields), side(mixed(0, 4), speed=0.17, seed=1, **fields)))
    assert change.common is None
    assert change.verdict is Verdict.SLOWER


def test_turns_of_equal_probes_at_other_rates_are_doubted(diff: Diff) -> None:
    """Every second probe errs, so that each time has probes of 45 GB/s, between others of 30 and of 60."""
    before, after = [[30.0, 45.0] * 6] * 8, [[60.0, 45.0] * 6] * 8
    change = only(diff(side(before, follows=0.0, speed=0.5, seed=2), side(after, follows=0.0, seed=1)))
    assert change.common is None  # a time that stays while the probes change does not follow them
    short = only(
        diff(side([row[:3] for row in before], follows=0.0, speed=0.5), side([row[:3] for row in after], follows=0.0))
    )
    assert short.common is not None
    assert short.ratio.verdict is Verdict.FASTER
    assert short.verdict is Verdict.UNDECIDED
    assert "memory was read at 30 GB/s before and at 60 after around turns with equal probes" in short.trust.why


def test_few_epochs_decide_nothing(diff: Diff) -> None:
    for count in (1, 2):
        result = diff(side(mixed(2, 2, count)), side(mixed(2, 2), speed=0.5, seed=1))
        assert only(result).verdict is Verdict.UNDECIDED
        assert f"{count} epoch{'' if count == 1 else 's'}, fewer than 3" in only(result).trust.why
        json.dumps(result.as_dict(), allow_nan=False)


def test_many_cases_widen_the_intervals(tmp_path: Path) -> None:
    files = []
    for name, speed in (("before", 1.0), ("after", 0.95)):
        sides = [side(mixed(2, 2), speed=speed, seed=number, name=f"fused{number}") for number in range(20)]
        files.append(
            (save_lines(tmp_path / f"{name}1.jsonl", sides[:1]), save_lines(tmp_path / f"{name}.jsonl", sides))
        )
    (before_one, before), (after_one, after) = files
    alone, among = (diff_records(*pair).changes[0].ratio for pair in ((before_one, after_one), (before, after)))
    assert among.value == alone.value
    assert among.high / among.low > alone.high / alone.low


def test_weights_that_stayed_in_place_need_2_percent(diff: Diff) -> None:
    for placed_anew, noise, word in ((True, 0.01, "placements"), (False, 0.02, "epochs")):
        sides = (side(mixed(2, 2), seed=seed, placed_anew=placed_anew) for seed in (0, 1))
        change = only(diff(*sides, tolerance=0.0))
        assert change.ratio.noise == noise
        assert f"between {word} ±" in change.basis


def test_no_change_below_what_the_machine_tells_apart_is_claimed(tmp_path: Path) -> None:
    apart = TellsApart(difference=0.04, seconds=60.0)
    before, after = (
        save_lines(
            tmp_path / f"{seed}.jsonl",
            [
                Comparison(
                    baseline=side(mixed(2, 2), seed=seed, name="hf-eager"), candidate=side(mixed(2, 2), seed=seed),
                    tokens_equal=True, first_difference=None, tells_apart=apart,
                )
            ],
        )
        for seed in (0, 1)
    )  # fmt: skip
    assert {change.ratio.noise for change in diff_records(before, after, tolerance=0.01).changes} == {0.04}


def test_first_tokens_have_no_rates(diff: Diff) -> None:
    change = only(diff(side(mixed(4, 0)), side(mixed(4, 0), speed=0.8, seed=1), metric="ttft"))
    assert change.common is None
    assert change.verdict is Verdict.SLOWER


@pytest.mark.parametrize("rounds_first", [True, False])
def test_an_old_record_is_compared_with_a_new_one(rounds_first: bool, diff: Diff) -> None:
    rounds = measurement("fused")  # 12 ms at 60 GB/s
    epochs = side([[60.0] * 8] * 6, speed=10 / 24)
    change = only(diff(*((rounds, epochs) if rounds_first else (epochs, rounds))))
    assert change.verdict is (Verdict.SLOWER if rounds_first else Verdict.FASTER)
    assert change.ratio.noise >= 0.02
    assert f"whole generations {'before' if rounds_first else 'after'}" in change.basis
    assert change.as_dict()["samples"] == (["round", "epoch"] if rounds_first else ["epoch", "round"])


def test_an_old_record_at_another_rate_is_doubted_as_before(diff: Diff) -> None:
    change = only(diff(measurement("fused"), side([[30.0] * 8] * 6, speed=10 / 12)))
    assert change.verdict is Verdict.UNDECIDED
    assert "memory was read at 60 GB/s before and at 30 after, which may explain it" in change.trust.why


def test_an_old_record_needs_six_rounds(diff: Diff) -> None:
    change = only(diff(measurement("fused", rounds=4), side([[60.0] * 8] * 4, speed=10 / 24)))
    assert "4 rounds, fewer than 6" in change.trust.why


def test_rounds_of_two_processes_may_differ_by_2_percent(diff: Diff) -> None:
    result = diff(measurement("fused"), measurement("fused"), tolerance=0.0)
    assert only(result).ratio.noise > 0.02
    assert "in rounds a change counts only beyond 2%" in " ".join(str(result).split())
    assert "in rounds" not in str(diff(measurement("fused"), measurement("fused")))


def test_a_table_fits_a_terminal_of_80_columns(diff: Diff) -> None:
    console = Console(width=80)
    with console.capture() as captured:
        console.print(diff(side(mixed(4, 0)), side(mixed(2, 2), seed=1)))
    lines = captured.get().splitlines()
    assert max(map(len, lines)) <= 80
    assert not any("…" in line for line in lines)
