"""The bench of tensor parallelism: its bars, and a page made from the records."""

from dataclasses import dataclass
from pathlib import Path

import pytest
from helpers.studies.comparisons import comparison, environment

from labkit.bench import parallel as parallel_bench
from labkit.bench.parallel import BASELINES, QUICK_ROUNDS, checks, exchange_checks
from labkit.harness import Comparison, load_records
from labkit.harness.exchange.records import ExchangeMeasurement
from labkit.models.presets import PRESETS


def comparisons(one_ms: float, two_ms: float, *, limit: float = 1.8) -> list[Comparison]:
    """Comparisons of two ranks (10 ms per token) with eager (40 ms), one thread (`one_ms`) and two threads (`two_ms`).

    The memory bandwidth of two cores is `limit` times that of one core.
    """
    sides = []
    for name, cores, step_ms, gb_s in (("eager", 2, 40.0, limit), ("one", 1, one_ms, 1.0), ("two", 2, two_ms, limit)):
        sides.append((name, {"threads": cores}, step_ms, gb_s))
    sides.append(("fused-tp2", {"threads": 1, "tp": 2}, 10.0, limit))
    measurements = []
    for name, sizes, step_ms, gb_s in sides:
        side = comparison().candidate
        runs = tuple(
            run.model_copy(update={"decode_ms": (step_ms, step_ms), "bandwidth_gb_s": (10 * gb_s, 10 * gb_s)})
            for run in side.runs
        )
        measurements.append(
            side.model_copy(update={"name": name, "case": side.case.model_copy(update=sizes), "runs": runs})
        )
    *baselines, candidate = measurements
    return [comparison().model_copy(update={"baseline": side, "candidate": candidate}) for side in baselines]


def sums(size: int, shared_us: float, gloo_us: float) -> ExchangeMeasurement:
    rounds = {"cpp": ((shared_us,) * 3,) * 2, "reference": ((gloo_us,) * 3,) * 2}
    return ExchangeMeasurement(
        ranks=2, bytes=size, transport="shared memory", pinned=True, environment=environment(), rounds_us=rounds
    )


def test_two_ranks_are_judged_by_what_the_memory_allows() -> None:
    assert [check.met for check in checks(comparisons(16.3, 10.0))] == [True, True, True]
    assert [check.met for check in checks(comparisons(16.1, 10.0))] == [False, True, True]
    assert [check.met for check in checks(comparisons(16.1, 10.0, limit=1.7))] == [True, True, True]


def test_two_ranks_may_take_a_little_longer_than_two_threads() -> None:
    assert [check.met for check in checks(comparisons(18.0, 10 / 1.04))] == [True, True, True]
    assert [check.met for check in checks(comparisons(18.0, 10 / 1.06))] == [True, False, True]


def test_other_tokens_miss_their_bar() -> None:
    first, *rest = comparisons(18.0, 10.0)
    different = first.model_copy(update={"tokens_equal": False, "first_difference": 3})
    assert [check.met for check in checks([different, *rest])] == [True, True, False]


def test_sums_of_a_decode_step_are_judged_and_larger_ones_are_not() -> None:
    rows = [sums(4096, 9.9, 50.0), sums(16384, 10.1, 50.0), sums(65536, 99.0, 99.0)]
    assert [check.met for check in exchange_checks(rows)] == [True, True, False, False]


def test_every_model_is_a_preset() -> None:
    assert set(parallel_bench.PARALLEL_MODELS) <= PRESETS.keys()


def test_a_bench_writes_what_it_measured_and_a_page_made_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Uses made-up figures; the tests below and the fourth notebook measure them."""

    class Turns:
        def comparison(self, baseline: int, candidate: int) -> Comparison:
            return compared[baseline]

    compared, exchanged = comparisons(18.0, 10.0), (sums(4096, 9.9, 50.0),)
    monkeypatch.setattr(parallel_bench, "PARALLEL_MODELS", ("tiny-gptj",))
    monkeypatch.setattr(parallel_bench, "measure_exchange", lambda *args, **settings: exchanged)
    monkeypatch.setattr(parallel_bench, "take_turns", lambda *args, **settings: Turns())
    parallel_bench.main(quick=True, output=tmp_path)
    (records,), (written,) = tmp_path.glob("*-quick-parallel.jsonl"), tmp_path.glob("*-quick-parallel.md")
    assert load_records(records) == [*exchanged, *compared]
    assert written.read_text() == parallel_bench.page(exchanged, compared)


@dataclass(frozen=True)
class Benched:
    exchanged: list[ExchangeMeasurement]
    compared: list[Comparison]
    page: str


@pytest.fixture(scope="module")
def benched(tmp_path_factory: pytest.TempPathFactory) -> Benched:
    """Records and page of a quick bench of a tiny model."""
    folder = tmp_path_factory.mktemp("benched")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parallel_bench, "PARALLEL_MODELS", ("tiny-gptj",))
        patch.setattr(parallel_bench, "PROMPT", 9)
        patch.setattr(parallel_bench, "QUICK_CALLS", 2)
        parallel_bench.main(quick=True, output=folder)
    (records,), (written,) = folder.glob("*-quick-parallel.jsonl"), folder.glob("*-quick-parallel.md")
    loaded = load_records(records)
    exchanged = [record for record in loaded if isinstance(record, ExchangeMeasurement)]
    return Benched(exchanged, [record for record in loaded if isinstance(record, Comparison)], written.read_text())


@pytest.mark.sweep
@pytest.mark.timeout(240)
def test_a_bench_writes_records_and_a_page_made_of_them(benched: Benched) -> None:
    compared, text = benched.compared, benched.page
    assert [record.candidate.name for record in compared] == ["fused-tp2"] * len(BASELINES)
    assert text == parallel_bench.page(benched.exchanged, compared)
    for part in ("## tiny-gptj", "start to ready", "that the memory allows", "wait for each other in"):
        assert part in text


@pytest.mark.sweep
@pytest.mark.timeout(240)
def test_sides_of_one_name_are_told_apart(benched: Benched) -> None:
    sides = [*(record.baseline for record in benched.compared), benched.compared[0].candidate]
    assert [side.name for side in sides] == ["hf-eager", "fused, 1 thread", "fused, 2 threads", "fused-tp2"]
    assert [(side.case.threads, side.case.tp) for side in sides] == [(2, 1), (1, 1), (2, 1), (1, 2)]
    assert [side.environment.threads for side in sides] == [2, 1, 2, 2]


@pytest.mark.sweep
@pytest.mark.timeout(240)
def test_all_sides_produce_the_same_tokens_in_as_many_rounds(benched: Benched) -> None:
    for record in benched.compared:
        assert record.tokens_equal
        assert len(record.baseline.runs) == len(record.candidate.runs) == QUICK_ROUNDS


@pytest.mark.sweep
@pytest.mark.timeout(240)
def test_only_a_side_on_several_ranks_has_stages_of_ranks_and_waits(benched: Benched) -> None:
    assert not any(record.baseline.rank_stages for record in benched.compared)
    assert not any(record.baseline.communication_shares for record in benched.compared)
    split = benched.compared[0].candidate
    assert len(split.rank_stages) == 2
    assert len(split.communication_shares) == 2
    assert all(0 < share < 1 for share in split.communication_shares)
