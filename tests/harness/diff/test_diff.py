"""Results of two days are compared: a change of the code is found, and a change of the machine is not taken for one."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.studies.comparisons import comparison, measurement
from helpers.studies.simulated_machines import QUIET, SHARED
from rich.console import Console

from labkit.harness import Comparison, Measurement, RecordsDiff, Verdict, diff_records, save
from labkit.harness.results import save_lines
from labkit.statistics import unpaired_ratio
from labkit.system.errors import UserError

PROFILES = Path(__file__).parents[3] / "profiles"


def scaled(side: Measurement, speed: float = 1.0, bandwidth: float = 1.0, **case: Any) -> Measurement:
    """The same side on a changed case, `speed` times as fast, with `bandwidth` times the memory bandwidth."""
    runs = tuple(
        run.model_copy(
            update={
                "ttft_ms": run.ttft_ms / speed,
                "decode_ms": tuple(step / speed for step in run.decode_ms),
                "end_to_end_ms": run.end_to_end_ms / speed,
                "bandwidth_gb_s": run.bandwidth_gb_s and tuple(probe * bandwidth for probe in run.bandwidth_gb_s),
            }
        )
        for run in side.runs
    )
    return side.model_copy(update={"runs": runs, "case": side.case.model_copy(update=case)})


def scaled_comparison(baseline: float = 1.0, candidate: float = 1.0, bandwidth: float = 1.0, **case: Any) -> Comparison:
    record = comparison()
    sides = {
        "baseline": scaled(record.baseline, baseline, bandwidth, **case),
        "candidate": scaled(record.candidate, candidate, bandwidth, **case),
    }
    return record.model_copy(update=sides)


@pytest.fixture
def diff(tmp_path: Path) -> Callable[..., RecordsDiff]:
    def diff_of(before: list[Any], after: list[Any], **options: Any) -> RecordsDiff:
        files = save_lines(tmp_path / "before.jsonl", before), save_lines(tmp_path / "after.jsonl", after)
        return diff_records(*files, **options)

    return diff_of


Diff = Callable[..., RecordsDiff]


def verdicts(result: RecordsDiff) -> dict[str, Verdict]:
    return {change.after.name: change.verdict for change in result.changes}


def test_changed_sides_are_told_from_unchanged_ones(diff: Diff) -> None:
    slower = diff([scaled_comparison()], [scaled_comparison(candidate=0.8)])
    assert verdicts(slower) == {"hf-eager": Verdict.SAME, "fused": Verdict.SLOWER}
    assert verdicts(diff([scaled_comparison(candidate=0.8)], [scaled_comparison()])) == {
        "hf-eager": Verdict.SAME,
        "fused": Verdict.FASTER,
    }
    (change,) = slower.of(Verdict.SLOWER)
    assert change.before.median / change.after.median == pytest.approx(change.ratio.value) == pytest.approx(0.8)
    assert change.ratio.low < 0.8 < change.ratio.high


def test_a_change_within_the_tolerance_is_none(diff: Diff) -> None:
    assert (
        verdicts(diff([scaled_comparison()], [scaled_comparison(candidate=0.8)], tolerance=0.5))["fused"]
        is Verdict.SAME
    )
    assert verdicts(diff([scaled_comparison()], [scaled_comparison(candidate=0.97)]))["fused"] is not Verdict.SLOWER


@pytest.mark.parametrize("metric", ["ttft", "end_to_end"])
def test_other_metrics_are_compared_when_asked_for(metric: str, diff: Diff) -> None:
    result = diff([scaled_comparison()], [scaled_comparison(candidate=0.8)], metric=metric)
    assert verdicts(result)["fused"] is Verdict.SLOWER
    assert result.changes[1].before.median == getattr(comparison().candidate, f"{metric}_ms")


def test_a_slower_machine_makes_no_side_slower(diff: Diff) -> None:
    """The baseline is the same code, so its loss is due to the machine."""
    result = diff([scaled_comparison()], [scaled_comparison(baseline=0.8, candidate=0.8)])
    assert set(verdicts(result).values()) == {Verdict.UNDECIDED}
    assert all("hf-eager, whose code is the same, became slower" in change.trust.why for change in result.changes)
    assert not result.of(Verdict.SLOWER)


def test_slower_memory_is_not_taken_for_slower_code(diff: Diff) -> None:
    result = diff([scaled(measurement("fused"))], [scaled(measurement("fused"), speed=0.8, bandwidth=0.8)])
    assert verdicts(result) == {"fused": Verdict.UNDECIDED}
    assert "memory was read at 60 GB/s before and at 48 after" in result.changes[0].trust.why
    worse = diff([scaled(measurement("fused"))], [scaled(measurement("fused"), speed=0.5, bandwidth=0.8)])
    assert verdicts(worse) == {"fused": Verdict.SLOWER}


def test_two_machines_are_compared_only_on_request(diff: Diff) -> None:
    other_machine = measurement("fused")
    other_machine = other_machine.model_copy(
        update={"environment": other_machine.environment.model_copy(update={"cpu": "Other CPU"})}
    )
    with pytest.raises(UserError, match=r"two machines \(cpu Test CPU @ 2 GHz, then Other CPU\).* parameter across_"):
        diff([measurement("fused")], [scaled(other_machine, 0.5)])
    result = diff([measurement("fused")], [scaled(other_machine, 0.5)], across_machines=True)
    assert verdicts(result) == {"fused": Verdict.SLOWER}
    assert "cpu Test CPU @ 2 GHz, then Other CPU" in result.environment


def test_other_software_is_named(diff: Diff) -> None:
    later = measurement("fused")
    packages = {**later.environment.packages, "torch": "2.14.0"}
    environment = later.environment.model_copy(update={"packages": packages, "commit": "def"})
    result = diff([measurement("fused")], [later.model_copy(update={"environment": environment})])
    assert result.environment == ("commit abc, then def", "torch 2.13.0, then 2.14.0")


def test_every_case_is_listed_once(diff: Diff) -> None:
    bfloat16 = measurement("fused", dtype="bfloat16")
    result = diff([scaled_comparison(), bfloat16], [scaled_comparison(), scaled(measurement("fused"), batch=4)])
    assert len(result.changes) == 2
    assert [result.name(words) for words in result.only_before] == ["bfloat16, batch 1, fused"]
    assert [result.name(words) for words in result.only_after] == ["float32, batch 4, fused"]
    document = json.loads(json.dumps(result.as_dict()))
    assert len(document["cases"]) == len(result.to_frame()) == 2
    assert [case["dtype"] for case in document["only_before"]] == ["bfloat16"]
    assert "only in" in str(result)


def test_the_latest_of_several_measurements_of_a_case_counts(diff: Diff) -> None:
    early = scaled(measurement("fused"), speed=0.5)
    late = measurement("fused").model_copy(update={"created": early.created.replace(year=2026)})
    result = diff([measurement("fused")], [late, early])
    assert verdicts(result) == {"fused": Verdict.SAME}
    assert any("left out 1 older" in remark for remark in result.remarks)


def test_a_side_against_itself_is_two_sides(diff: Diff) -> None:
    record = comparison()
    itself = record.model_copy(update={"baseline": record.candidate})
    assert set(verdicts(diff([itself], [itself]))) == {"fused, as baseline", "fused, as candidate"}


def test_few_rounds_decide_nothing(diff: Diff) -> None:
    for rounds in (1, 3):
        result = diff([measurement("fused", rounds=rounds)], [scaled(measurement("fused"), speed=0.5)])
        assert verdicts(result) == {"fused": Verdict.UNDECIDED}
        assert f"{rounds} round{'' if rounds == 1 else 's'}, fewer than 6" in result.changes[0].trust.why


@pytest.mark.parametrize("machine", [QUIET, SHARED], ids=["quiet", "shared"])
def test_a_side_is_rarely_slower_than_itself_on_another_day(machine: Any) -> None:
    rng = np.random.default_rng(1)
    days = machine.rounds(rng, 60, 7)[0], machine.rounds(rng, 60, 7)[0] * np.exp(0.02 * rng.standard_normal((60, 1)))
    result = [
        unpaired_ratio(before, after, tolerance=0.05, ratios=20).verdict for before, after in zip(*days, strict=True)
    ]
    assert sum(verdict in (Verdict.FASTER, Verdict.SLOWER) for verdict in result) <= 2


def test_kept_records_equal_themselves(tmp_path: Path) -> None:
    """Records of regions, of loading and of ranks."""
    file, paths = tmp_path / "some.jsonl", sorted(PROFILES.glob("*2026-11-2[12]-[prl]*.jsonl"))
    assert paths
    for path in paths:
        file.write_text("\n".join(path.read_text().splitlines()[:8]))
        result = diff_records(file, file)
        assert result.changes
        assert not result.of(Verdict.SLOWER)
        assert not result.of(Verdict.FASTER)


def test_a_table_fits_a_terminal_of_80_columns(diff: Diff) -> None:
    console = Console(width=80)
    with console.capture() as captured:
        console.print(diff([scaled_comparison()], [scaled_comparison(candidate=0.8)]))
    lines = captured.get().splitlines()
    assert max(map(len, lines)) <= 80
    assert not any("…" in line for line in lines)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"metric": "per_tokn"},
            r"unknown metric 'per_tokn' \(did you mean 'per_token' or 'end_to_end'\?\); expected one of ttft",
        ),
        ({"tolerance": -0.1}, "got tolerance = -0.1, expected at least 0"),
        ({"tolerance": float("nan")}, "got tolerance = nan, expected a number"),
    ],
)
def test_what_cannot_be_asked_is_refused(options: dict[str, Any], message: str, diff: Diff) -> None:
    with pytest.raises(UserError, match=message):
        diff([measurement("fused")], [measurement("fused")], **options)


def test_what_cannot_be_compared_is_refused(tmp_path: Path, diff: Diff) -> None:
    with pytest.raises(UserError, match=r"got no common case: .*gpt2, float32, batch 1"):
        diff([measurement("fused")], [measurement("hf-eager")])
    good = save(measurement("fused"), tmp_path / "records")
    (tmp_path / "empty").mkdir()
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe\x00")
    for path, message in (
        ("none", r"none, which does not exist; expected a file of JSON lines, or a folder"),
        ("empty", "empty, which holds no results; expected files of JSON lines"),
        ("binary.jsonl", "is not UTF-8 text"),
    ):
        with pytest.raises(UserError, match=message):
            diff_records(good, tmp_path / path)
    (quality,) = PROFILES.glob("*-quality.jsonl")
    with pytest.raises(UserError, match="11 records, none of them timed by per_token"):
        diff_records(quality, good)
