"""`make bench`: verdicts follow from the bars, the page from the records, and an interrupted run continues."""

from dataclasses import replace
from pathlib import Path

import pytest
import typer
from helpers.studies.comparisons import comparison

from labkit.bench import models as bench_module
from labkit.bench import report as bench_report
from labkit.bench import targets
from labkit.bench.models import Settings
from labkit.bench.report import Row, report, rows
from labkit.bench.targets import TARGETS, Target
from labkit.harness import Comparison, load_records
from labkit.harness.compare.compare import compare_with_each, comparison_case
from labkit.harness.compare.peers.llama_cpp import LLAMA_CPP, LlamaCpp
from labkit.harness.compare.plan import Schedule
from labkit.harness.environment import read_environment
from labkit.harness.records import Measurement
from labkit.harness.runs import TokenTurn
from labkit.models.presets import PRESETS

GPT2 = next(target for target in TARGETS if target.key == ("gpt2", "float32", 1, "fused"))


def with_llama_cpp(record: Comparison) -> Comparison:
    """The same comparison, with llama.cpp as the name of its baseline."""
    return record.model_copy(update={"baseline": record.baseline.model_copy(update={"name": LLAMA_CPP})})


def test_every_target_is_a_preset_and_stands_there_once() -> None:
    assert len({target.key for target in TARGETS}) == len(TARGETS)
    assert {target.model for target in TARGETS} <= PRESETS.keys()


def test_a_figure_on_its_bar_is_met_and_one_below_it_missed() -> None:
    record = comparison()
    reached = record.ratio("per_token").value
    assert Row(replace(GPT2, per_token=reached), record).checks["per_token"].met
    assert not Row(replace(GPT2, per_token=reached * 1.0001), record).checks["per_token"].met


def test_a_bar_past_the_limit_is_missed_with_what_the_limit_allows() -> None:
    record = comparison()
    assert record.candidate.floor_share is not None
    most = record.ratio("per_token").value / record.candidate.floor_share
    beyond = Row(replace(GPT2, per_token=1.01 * most), record).checks["per_token"]
    assert f"missed; at the limit it would be {most:.2f}x" in str(beyond)
    assert "at the limit" not in str(Row(replace(GPT2, per_token=0.99 * most), record).checks["per_token"])
    assert "at the limit" not in str(Row(replace(GPT2, ttft=99.0), record).checks["ttft"])


def test_a_bar_within_the_interval_is_called_close() -> None:
    record = comparison()
    ratio = record.ratio("per_token")
    for bar, close in ((ratio.high, True), (ratio.high * 1.01, False), (ratio.low * 0.99, False)):
        assert Row(replace(GPT2, per_token=bar), record).checks["per_token"].close is close


def with_peak(record: Comparison, peak_rss_mb: float) -> Comparison:
    return record.model_copy(update={"candidate": record.candidate.model_copy(update={"peak_rss_mb": peak_rss_mb})})


def test_memory_is_held_against_weights_and_cache() -> None:
    record = comparison()
    needed = 507.0  # MB of weights and KV cache of the comparison
    assert Row(GPT2, with_peak(record, needed * 1.14)).checks["memory"].met
    assert not Row(GPT2, with_peak(record, needed * 1.16)).checks["memory"].met


def test_only_float32_tokens_have_to_be_equal() -> None:
    unequal = comparison().model_copy(update={"tokens_equal": False, "first_difference": 7})
    assert not Row(GPT2, unequal).checks["tokens"].met
    assert "tokens" not in Row(replace(GPT2, dtype="bfloat16"), unequal).checks


def test_what_was_not_measured_is_not_judged() -> None:
    unprobed = comparison(probed=False)
    assert "limit_share" not in Row(GPT2, unprobed).checks
    assert "llama_cpp" not in Row(GPT2, unprobed).checks
    assert "llama_cpp" in Row(GPT2, unprobed, with_llama_cpp(unprobed)).checks


def test_the_page_names_every_missed_bar_and_every_side() -> None:
    record = with_peak(comparison(), 600.0)
    records = [record, with_llama_cpp(record)]
    (row,) = rows(records)
    missed = [check for check in row.checks.values() if not check.met]
    page = report(records)
    assert missed
    assert all(f"{check.what}: {check.figure}" in page for check in missed)
    assert f"{len(row.checks) - len(missed)} of {len(row.checks)} bars met" in page
    assert f"| {' | '.join(targets.FUSED.names)} |" in page
    assert "random weights" in page


def test_the_page_says_how_the_sides_were_measured_beside_each_other() -> None:
    record = comparison(rounds=8)
    turn = TokenTurn(pair=0, place=0, at_s=0.0, first_step_ms=2.0, step_ms=1.0)
    turned = {"turns": (turn,), "prompts_ms": (1.0,)}

    def with_turns(side: Measurement, placed_anew: bool) -> Measurement:
        runs = tuple(run.model_copy(update=turned) for run in side.runs[:6])
        return side.model_copy(update={"runs": runs, "placed_anew": placed_anew})

    in_epochs, in_place = (
        record.model_copy(
            update={
                "baseline": with_turns(record.baseline, placed_anew=True),
                "candidate": with_turns(record.candidate, placed_anew=placed_anew),
            }
        )
        for placed_anew in (True, False)
    )
    assert "8 rounds with one run of every side" in report([record])
    epochs = "6 epochs of turns of a few tokens in random order, each with the weights in"
    assert f"{epochs} new memory, each side" in report([in_epochs])
    assert f"{epochs} the same memory as all others, each side" in report([in_place])
    assert f"{epochs} new memory, except in 1 of 2 comparisons, each side" in report([in_epochs, in_place])
    assert "6 to 8 rounds" in report([record, in_epochs])


def test_the_page_marks_ratios_that_are_not_trustworthy() -> None:
    for rounds, marks in ((3, 2), (8, 0)):
        page = report([comparison(rounds=rounds)]).splitlines()
        line = next(line for line in page if line.startswith("| gpt2 float32"))
        assert line.count("not trustworthy") == marks  # after the ratio and after its bar


def test_every_table_of_the_page_has_as_many_cells_as_titles() -> None:
    tables = [block for block in report([comparison()]).split("\n\n") if block.startswith("|")]
    assert tables
    for table in tables:
        assert len({line.count(" | ") for line in table.splitlines()}) == 1


def test_a_case_is_kept_only_when_all_of_it_was_measured_as_asked_now() -> None:
    record = comparison(new_tokens=128)
    settings = Settings(new=128, rounds=record.rounds, threads=2, peer=False)
    done = bench_module._done
    assert done(GPT2, settings, [record], "abc")
    assert not done(GPT2, settings, [record], "def")
    assert not done(GPT2, replace(settings, threads=1), [record], "abc")
    assert not done(GPT2, replace(settings, new=8), [record], "abc")
    assert not done(GPT2, replace(settings, rounds=record.rounds + 1), [record], "abc")
    assert not done(replace(GPT2, dtype="bfloat16"), settings, [record], "abc")
    assert not done(GPT2, replace(settings, peer=True), [record], "abc")
    assert done(GPT2, replace(settings, peer=True), [record, with_llama_cpp(record)], "abc")


def test_the_estimate_grows_with_the_rounds_and_the_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_module, "probe_bandwidth", lambda threads, device: 20.0)
    settings = Settings(new=128, rounds=2, threads=1, peer=False)
    few = bench_module._seconds(GPT2, settings)
    assert 0 < few < bench_module._seconds(GPT2, replace(settings, rounds=20))
    assert few < bench_module._seconds(GPT2, replace(settings, rounds=2, peer=True))


@pytest.fixture
def two_small_targets(monkeypatch: pytest.MonkeyPatch) -> tuple[Target, ...]:
    """Two cases that take seconds, without llama.cpp."""
    small = (
        Target("tiny-gpt2", "float32", 1, per_token=1.0, limit_share=0.5, ttft=1.0, llama_cpp=1.1),
        Target("tiny-llama", "float32", 2, per_token=1.0),
    )
    for module in (bench_module, bench_report):
        monkeypatch.setattr(module, "TARGETS", small)
    monkeypatch.setattr(LlamaCpp, "unavailable", lambda peer: "not here")
    return small


def bench(output: Path, *, fresh: bool = False) -> int:
    with pytest.raises(typer.Exit) as exit_info:
        bench_module.main(quick=True, only=None, fresh=fresh, output=output, threads=1, rounds=2)
    return exit_info.value.exit_code


def made_up(target: Target, settings: Settings) -> tuple[Comparison, ...]:
    """Made-up comparison that a measurement of the target could have given."""
    record = comparison(rounds=settings.rounds, new_tokens=settings.new, threads=settings.threads)
    case = record.case.model_copy(update={"model": target.model, "batch": target.batch})
    circumstances = {"case": case, "environment": read_environment(settings.threads)}
    sides = {name: getattr(record, name).model_copy(update=circumstances) for name in ("baseline", "candidate")}
    return (record.model_copy(update=sides),)


@pytest.mark.parametrize("measured", [False, pytest.param(True, marks=pytest.mark.sweep)])
def test_a_bench_writes_records_and_page_and_keeps_what_is_done(
    measured: bool,
    two_small_targets: tuple[Target, ...],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not measured:
        monkeypatch.setattr(bench_module, "_measure", made_up)
    assert bench(tmp_path) == 0
    first = capsys.readouterr()
    assert "not here" in first.err
    assert first.out.startswith("about ")
    (records_file,), (page,) = tmp_path.glob("*.jsonl"), tmp_path.glob("*.md")
    assert len(list(tmp_path.iterdir())) == 2
    records = [record for record in load_records(records_file) if isinstance(record, Comparison)]
    assert [row.target for row in rows(records)] == list(two_small_targets)
    assert page.read_text() == report(records)

    assert bench(tmp_path) == 0
    assert "for 0 cases, 2 kept" in capsys.readouterr().out
    assert load_records(records_file) == records


def test_an_interrupted_case_is_kept_and_ends_the_bench(
    two_small_targets: tuple[Target, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A measurement that the user ends after some epochs has a result. It is measured again by the next call."""

    def measure(target: Target, settings: Settings) -> tuple[Comparison, ...]:
        assert target == two_small_targets[0]
        return tuple(record.model_copy(update={"interrupted": True}) for record in made_up(target, settings))

    monkeypatch.setattr(bench_module, "_measure", measure)
    with pytest.raises(KeyboardInterrupt):
        bench_module.main(quick=True, only=None, fresh=False, output=tmp_path, threads=1, rounds=2)
    (record,) = load_records(tmp_path)
    assert isinstance(record, Comparison)
    settings = Settings(new=record.case.new_tokens, rounds=record.rounds + 1, threads=1, peer=False)
    assert not bench_module._done(two_small_targets[0], settings, [record], record.candidate.environment.commit)


def test_a_case_that_fails_is_reported_and_the_others_are_measured(
    two_small_targets: tuple[Target, ...],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def measure(target: Target, settings: Settings) -> tuple[Comparison, ...]:
        if target.model == "tiny-gpt2":
            raise RuntimeError("out of luck")
        return made_up(target, settings)

    monkeypatch.setattr(bench_module, "_measure", measure)
    assert bench(tmp_path) == 1
    assert "tiny-gpt2 float32: out of luck" in capsys.readouterr().err
    (record,) = load_records(tmp_path)
    assert isinstance(record, Comparison)
    assert record.case.model == "tiny-llama"


def test_a_peer_that_fails_costs_its_own_column_only(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(target: Target, settings: Settings) -> tuple[Comparison, ...]:
        if LLAMA_CPP in settings.baselines(target):
            raise RuntimeError("the peer is out of luck")
        return (comparison(),)

    monkeypatch.setattr(bench_module, "_measure", measure)
    settings = Settings(new=8, rounds=2, threads=1, peer=True)
    assert bench_module._attempt(GPT2, settings) == (comparison(),)
    assert "the peer is out of luck" in capsys.readouterr().err


def test_an_unknown_model_is_refused_with_the_known_ones() -> None:
    with pytest.raises(typer.BadParameter, match=r"got 'gpt-17', expected one of gpt2, gpt2-medium"):
        bench_module._select(["gpt-17"])


@pytest.mark.sweep
def test_a_short_warm_up_leaves_the_runs_of_both_sides_as_long_as_they_were() -> None:
    """tests/harness/compare tests the same with one side."""
    case = comparison_case(model="tiny-gpt2", dtype="float32", batch=1, prompt=4, new=5, threads=1)
    schedule = Schedule(rounds=2, turns=False, warm_up=2, stages=False)
    (record,) = compare_with_each(("hf-eager",), "fused", case, schedule)
    assert {len(run.decode_ms) for side in (record.baseline, record.candidate) for run in side.runs} == {4}
    assert record.tokens_equal
    assert record.candidate.stages == ()


def test_models_and_cases_are_measured_alone() -> None:
    names = [target.name for target in bench_module._select(["smollm2-135m", "gpt2 int8"])]
    assert "gpt2 int8" in names
    assert {name.split()[0] for name in names if name != "gpt2 int8"} == {"smollm2-135m"}
    with pytest.raises(typer.BadParameter, match=r"got 'gpt2 int3', expected one of gpt2, gpt2-medium, .*gpt2 int8"):
        bench_module._select(["gpt2 int3"])
