"""The bench of a side against itself: what the rule says of epochs, the page, and a bench that goes on."""

import math
from pathlib import Path

import numpy as np
import pytest
from helpers.studies.comparisons import in_epochs, measurement
from helpers.sweeps import sweep

from labkit.bench import self_comparison as bench
from labkit.harness import Comparison, load_records
from labkit.harness.self_comparison_record import SelfComparison
from labkit.statistics import Verdict
from labkit.system.whole_file import write_whole


def compared(scatter: float, epochs: int = 20, *, seed: int = 0, factor: float = 1.0) -> Comparison:
    """A side against itself. The ratios of the epochs scatter by `scatter` around `factor`."""
    rng, side = np.random.default_rng(seed), measurement("fused")
    ratios = factor * np.exp(scatter * rng.standard_normal(epochs))
    return Comparison(
        baseline=in_epochs(side, [[(12.0 * ratio, 40.0)] * 4 for ratio in ratios]),
        candidate=in_epochs(side, [[(12.0, 40.0)] * 4] * epochs, place=1),
        tokens_equal=True,
        first_difference=None,
        looks=(3, 4, 6, 8, 11, 15, 20),
    )


@pytest.mark.parametrize("placed_anew", [True, False])
def test_a_record_keeps_the_interval_and_the_verdict_of_its_comparison(placed_anew: bool, tmp_path: Path) -> None:
    of = compared(0.001)
    of = of.model_copy(update={"candidate": of.candidate.model_copy(update={"placed_anew": placed_anew})})
    record = SelfComparison.of(of)
    assert record.ratio == of.ratio("per_token")
    assert record.verdict is of.verdict is Verdict.SAME
    write_whole(tmp_path / "one.jsonl", record.model_dump_json() + "\n")
    assert load_records(tmp_path) == [record]


@pytest.mark.parametrize("factor", [1.05, 1 / 1.05, 1.3])
def test_a_difference_is_found_as_late_as_by_a_comparison_that_had_it(factor: float) -> None:
    equal, shifted = SelfComparison.of(compared(0.01)), SelfComparison.of(compared(0.01, factor=factor))
    assert shifted.verdict is (Verdict.FASTER if factor > 1 else Verdict.SLOWER)
    assert equal.found_after_s(factor) == pytest.approx(shifted.found_after_s(1 + 1e-12 * math.copysign(1, factor - 1)))


def test_larger_differences_are_found_earlier_and_none_in_noise() -> None:
    record = SelfComparison.of(compared(0.02))
    after = [record.found_after_s(factor) for factor in (1.05, 1.1, 1.5)]
    assert None not in after
    assert after == sorted(after, reverse=True)  # type: ignore[type-var]
    assert SelfComparison.of(compared(0.3)).found_after_s(1.05) is None


def test_epochs_that_say_the_opposite_find_nothing() -> None:
    assert SelfComparison.of(compared(0.01, factor=1.2)).found_after_s(1 / 1.05) is None


def test_the_bars_count_verdicts_intervals_and_what_was_found() -> None:
    records = [SelfComparison.of(compared(0.01, seed=seed)) for seed in range(10)]
    checks = {check.what: check for check in bench.checks(records)}
    assert all(check.met for check in checks.values())
    wrong = SelfComparison.of(compared(0.01, factor=1.2))
    checks = {check.what: check for check in bench.checks([*records, wrong])}
    assert checks["FASTER or SLOWER"].figure == "9%"
    assert not checks["FASTER or SLOWER"].met
    assert checks["SAME"].figure == "91%"


def test_the_page_has_a_part_for_each_case() -> None:
    records = [SelfComparison.of(compared(0.01, seed=seed)) for seed in range(3)]
    other = records[0].model_copy(update={"against": "fused at abc"})
    text = bench.page([*records, other])
    case = "gpt2, float32, batch 1, 128 + 32 tokens, 2 threads"
    assert f"## fused against fused: {case}\n\n3 comparisons: 3 SAME. 20 to 20" in text
    assert f"## fused against fused at abc: {case}\n\n1 comparisons: 1 SAME." in text


def test_a_stopped_bench_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[str] = []

    def stop_after_three(*sides: str, dtype: str, threads: int, **_: object) -> Comparison:
        if len(measured) == 3:
            raise KeyboardInterrupt
        measured.append(dtype)
        of = compared(0.01)
        case = of.candidate.case.model_copy(update={"dtype": dtype, "threads": threads})
        environment = bench.read_environment(1)
        sides_of = [
            side.model_copy(update={"case": case, "environment": environment}) for side in (of.baseline, of.candidate)
        ]
        return of.model_copy(update={"baseline": sides_of[0], "candidate": sides_of[1]})

    monkeypatch.setattr(bench, "compare", stop_after_three)
    options = {"model": "gpt2", "dtype": "bfloat16,float32", "side": "fused", "against": None, "threads": 1}
    with pytest.raises(KeyboardInterrupt):
        bench.main(runs=2, output=tmp_path, **options)  # type: ignore[arg-type]
    measured.clear()
    bench.main(runs=2, output=tmp_path, **options)  # type: ignore[arg-type]
    assert measured == ["float32"]
    assert len(load_records(tmp_path)) == 4
    for changed in ({"threads": 2}, {"against": "HEAD"}, {"against": "HEAD^"}):
        measured.clear()
        bench.main(runs=2, output=tmp_path, **{**options, "dtype": "float32", **changed})  # type: ignore[arg-type]
        assert measured == ["float32", "float32"]  # other settings are measured from the beginning
    assert len(load_records(tmp_path)) == 10


@sweep
def test_a_real_side_is_compared_with_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"model": "tiny-gpt2", "dtype": "float32", "side": "fused", "against": None, "threads": 1}
    monkeypatch.setattr(bench, "BUDGET_S", 2.0)
    bench.main(runs=2, output=tmp_path, **options)  # type: ignore[arg-type]
    records = [record for record in load_records(tmp_path) if isinstance(record, SelfComparison)]
    assert [len(record.logs) == len(record.ends_s) >= 3 for record in records] == [True, True]
