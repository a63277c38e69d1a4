"""The bench of pipelines: its bars, and a page made from the records."""

from pathlib import Path
from typing import Any

import pytest
from helpers.studies.comparisons import comparison, environment
from helpers.studies.pipeline_studies import run, study

from labkit.bench import pipeline as bench
from labkit.bench.pipeline import (
    BARRIER,
    NAIVE,
    QUEUE,
    TRANSFORMERS,
    Compared,
    by_formula,
    checks,
    micro_batches,
    stage_ms,
)
from labkit.bench.targets import PIPELINE_MODEL, PIPELINE_TARGETS, PipelineTarget
from labkit.engine import StageTime
from labkit.harness import Comparison, load_records
from labkit.harness.compare.plan import SideSpec
from labkit.harness.exchange.hand_over import measure_hand_over
from labkit.harness.exchange.records import HandOverMeasurement
from labkit.harness.records import Measurement
from labkit.models.presets import PRESETS
from labkit.stages import Phase, Stage

NEW = 8
FULL = PipelineTarget(32, naive=1.7, transformers=1.8)


def side(name: str, step_ms: float, stages: tuple[float, float], batch: int) -> Measurement:
    """Measurement of a side: `step_ms` per token, and `stages` are the computing times (ms) for a micro-batch."""
    spec, template = SideSpec.named(name, 2), comparison(new_tokens=NEW).candidate
    steps = (NEW - 1) * (1 if spec.schedule == "naive" else 2)
    ranks = tuple(
        (
            StageTime(Phase.DECODE, Stage.MLP, 0, steps, stage * steps),
            StageTime(Phase.DECODE, Stage.RECV, None, steps, 1.0 * steps),
        )
        for stage in stages
    )
    case: dict[str, Any] = {"threads": 1, "tp": spec.tp, "pp": spec.pp, "schedule": spec.schedule, "batch": batch}
    times = {"decode_ms": (step_ms,) * (NEW - 1), "end_to_end_ms": NEW * step_ms}
    return template.model_copy(
        update={
            "name": name,
            "case": template.case.model_copy(update=case),
            "runs": tuple(run.model_copy(update=times) for run in template.runs),
            "rank_stages": ranks if spec.pp > 1 else (),
        }
    )


def comparisons_of(batch: int = 32, stage: float = 5.0, **steps_ms: float) -> list[Comparison]:
    """Comparisons of the queue (10 ms per token) with the other schedules."""
    steps = {"naive": 20.0, "barrier": 15.0, "transformers": 30.0} | steps_ms
    candidate = side(QUEUE, 10.0, (stage, stage), batch)
    sides = [
        side(NAIVE, steps["naive"], (2 * stage, 2 * stage) if batch > 2 else (stage, stage), batch),
        side(BARRIER, steps["barrier"], (stage, stage), batch),
        side(TRANSFORMERS, steps["transformers"], (stage, stage), batch),
    ]
    return [comparison().model_copy(update={"baseline": baseline, "candidate": candidate}) for baseline in sides]


def compared(**settings: Any) -> Compared:
    return bench.by_baseline(comparisons_of(**settings))


def met(target: PipelineTarget, comparisons: Compared) -> dict[str, bool]:
    return {check.what: check.met for check in checks(target, comparisons)}


def test_the_queue_is_judged_per_token_and_with_the_prompt() -> None:
    assert set(met(FULL, compared()).values()) == {True}
    slow = met(FULL, compared(naive=16.9, transformers=17.9))
    assert [what for what, passed in slow.items() if not passed] == [
        f"{name} / {QUEUE} {what}" for name in (NAIVE, TRANSFORMERS) for what in ("per token", "prompt included")
    ]


def test_a_batch_without_bars_is_judged_by_its_order_and_tokens_alone() -> None:
    assert set(met(PipelineTarget(2), compared(batch=2))) == {f"{BARRIER} / {QUEUE} per token", "tokens"}


def test_barrier_and_naive_are_judged_where_the_formula_tells_them_apart() -> None:
    """If computing is the limit: 3 * 5 ms against 2 * 10 ms. If weights are the limit: 3 * 5 against 2 * 5 ms."""
    order = f"{NAIVE} / {BARRIER} per token"
    assert met(FULL, compared())[order]
    assert not met(FULL, compared(barrier=20.1))[order]
    assert order not in met(FULL, compared(batch=2))


def test_formulas_take_the_time_of_a_stage_for_a_micro_batch() -> None:
    by_name = compared()
    assert stage_ms(by_name[NAIVE].baseline) == [10.0, 10.0]
    assert by_formula(by_name[NAIVE].baseline) == 20.0
    assert by_formula(by_name[BARRIER].baseline) == 15.0
    assert by_formula(by_name[NAIVE].candidate) == 10.0
    assert [micro_batches(record) for record in (by_name[NAIVE].baseline, by_name[NAIVE].candidate)] == [1, 2]
    assert by_formula(comparison().candidate) is None


def test_a_queue_that_chose_one_micro_batch_has_the_formula_of_one() -> None:
    in_one = side(NAIVE, 20.0, (9.0, 11.0), 2)
    queue = in_one.model_copy(update={"case": in_one.case.model_copy(update={"schedule": "queue"})})
    assert micro_batches(queue) == 1
    assert by_formula(queue) == 20.0


def test_other_tokens_miss_their_bar() -> None:
    first, *rest = comparisons_of()
    different = first.model_copy(update={"tokens_equal": False, "first_difference": 3})
    assert not met(FULL, bench.by_baseline([different, *rest]))["tokens"]


def test_the_model_and_its_batches_are_there() -> None:
    assert PIPELINE_MODEL in PRESETS
    assert [target.batch for target in PIPELINE_TARGETS] == [2, 8, 32]


def handed(us: float) -> HandOverMeasurement:
    return HandOverMeasurement(
        rows=32, width=1024, transport="shared memory", environment=environment(), rounds_us=((us,) * 3,) * 2
    )


def test_a_hand_over_is_judged_by_its_median() -> None:
    assert bench.hand_over_check(handed(29.9)).met
    assert not bench.hand_over_check(handed(30.1)).met


def test_a_bubble_is_judged_by_its_distance_from_the_formula() -> None:
    """Equal stages have no bubble; a stage that takes half the time of the other one waits for it."""
    equal, unequal = (study(runs=(run("queue", 2, stage_ms=times),)).measured for times in ((4.0, 4.0), (2.0, 4.0)))
    assert [check.met for measured in (equal, unequal) for check in bench.bubble_checks(measured)] == [True, False]


def test_a_bench_of_one_batch_keeps_the_others_and_makes_its_page_of_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Uses made-up figures."""

    class Turns:
        def __init__(self, batch: int) -> None:
            self._comparisons = comparisons_of(batch)

        def comparison(self, baseline: int, candidate: int) -> Comparison:
            return self._comparisons[baseline]

    handing = handed(19.0)
    monkeypatch.setattr(bench, "measure_hand_over", lambda *args, **settings: handing)
    monkeypatch.setattr(bench, "take_turns", lambda sides, case, schedule, **settings: Turns(case.batch))
    stages = study().measured
    monkeypatch.setattr(bench, "measure_pipeline", lambda model, **settings: stages)
    for batch in (32, 2, 32):
        baselines = [NAIVE, BARRIER, TRANSFORMERS]
        bench.main(quick=True, output=tmp_path, batch=[batch], against=baselines, bubbles=batch == 2)
    (records,), (written,) = tmp_path.glob("*-quick-pipeline.jsonl"), tmp_path.glob("*-quick-pipeline.md")
    mailbox, bubbles, *loaded = load_records(records)
    assert (mailbox, bubbles) == (handing, stages)
    assert [record.case.batch for record in loaded if isinstance(record, Comparison)] == [2] * 3 + [32] * 3
    text = written.read_text()
    assert text == bench.page(handing, [record for record in loaded if isinstance(record, Comparison)], [stages])
    for part in ("## Batch 2", "## Batch 32", "## Bubbles", "## Mailboxes", "by formula", "bars met"):
        assert part in text


@pytest.mark.sweep
@pytest.mark.timeout(120)
def test_rows_are_handed_over_and_timed_on_both_ranks() -> None:
    measurement = measure_hand_over(3, 7, rounds=2, calls=4)
    assert [len(calls) for calls in measurement.rounds_us] == [8, 8]
    assert measurement.median_us > 0


@pytest.mark.parametrize("options", [{"batch": [5]}, {"against": ["fused-pp3"]}])
def test_what_cannot_be_measured_is_refused_before_anything_runs(options: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"expected any of \[.*32.*\] and of .*fused-pp2-naive"):
        bench.main(output=tmp_path, **options)
    assert not list(tmp_path.iterdir())
