"""A comparison claims no more than its rounds, the machine and the probes support."""

import io
import json
from collections.abc import Callable
from typing import Any

import pytest
from helpers.studies.comparisons import comparison
from helpers.studies.drawn import subtitle, texts, title
from rich.console import Console

from labkit.figures import headline, latency_figure, notes, per_token_figure, published_figure, summary_table
from labkit.harness import Comparison, Measurement, Verdict
from labkit.harness.runs import Case, Run
from labkit.studies.comparison_words import speedup_line


def with_sides(record: Comparison, changed: Callable[[Measurement], Measurement]) -> Comparison:
    return record.model_copy(update={"baseline": changed(record.baseline), "candidate": changed(record.candidate)})


def with_runs(record: Comparison, **update: Any) -> Comparison:
    """The same comparison, with fields replaced in all its runs."""

    def changed(side: Measurement) -> Measurement:
        return side.model_copy(update={"runs": tuple(run.model_copy(update=update) for run in side.runs)})

    return with_sides(record, changed)


def in_cache(record: Comparison, cache_mb: float) -> Comparison:
    """The same comparison on a machine with caches of this size."""

    def changed(side: Measurement) -> Measurement:
        return side.model_copy(update={"environment": side.environment.model_copy(update={"cache_mb": cache_mb})})

    return with_sides(record, changed)


def scattered(rounds: int = 8) -> Comparison:
    """hf-eager against fused, where runs of the candidate take up to a hundred times as long as others."""

    def slowed(run: Run, factor: float) -> Run:
        times = {"ttft_ms": run.ttft_ms * factor, "end_to_end_ms": run.end_to_end_ms * factor}
        return run.model_copy(update=times | {"decode_ms": tuple(step * factor for step in run.decode_ms)})

    record = comparison(rounds=rounds)
    runs = tuple(slowed(run, 10 ** (2 * index / rounds)) for index, run in enumerate(record.candidate.runs))
    return record.model_copy(update={"candidate": record.candidate.model_copy(update={"runs": runs})})


BUSY = with_runs(comparison(), others_cores=1.4)
PAST_THE_LIMIT = with_runs(comparison(), bandwidth_gb_s=(5.0, 5.0))
UNTRUSTED = [BUSY, PAST_THE_LIMIT, comparison(rounds=3), scattered()]
IDS = ["busy", "past the limit", "three rounds", "scattered"]


def printed(record: Comparison) -> str:
    console = Console(width=400, file=io.StringIO())
    console.print(record)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_a_quiet_comparison_keeps_its_verdict() -> None:
    record = with_runs(comparison(), others_cores=0.03)
    assert record.trust().trustworthy
    assert record.verdict is Verdict.FASTER
    assert record.as_dict()["trustworthy"] is True
    assert record.as_dict()["distrust"] == []
    assert "trustworthy" not in headline(record).lower()


@pytest.mark.parametrize("record", UNTRUSTED, ids=IDS)
def test_noise_is_never_sold_as_a_result(record: Comparison) -> None:
    """Every text with the ratio says that it is not trustworthy, and no text says FASTER."""
    why, remedy = record.trust().why, record.trust().remedy
    assert why
    assert record.verdict is Verdict.UNDECIDED
    figures = record.as_dict()
    assert (figures["verdict"], figures["trustworthy"]) == ("UNDECIDED", False)
    assert "; ".join(figures["distrust"]) == why
    assert json.loads(json.dumps(figures)) == figures
    for text in (headline(record), printed(record), notes(record)):
        assert "not trustworthy" in text.lower()
        assert why in text
        assert remedy in text
        assert "FASTER" not in text
    assert headline(record).lower().count("trustworthy") == 1
    assert list(summary_table(record)["verdict"][:3]) == ["not trustworthy"] * 3
    assert "FASTER" not in speedup_line(record)
    for draw in (latency_figure, per_token_figure, published_figure):
        figure = draw(record)
        assert "not trustworthy, for the reasons that stand with the result" in subtitle(figure)
        assert "FASTER" not in title(figure)
        assert "FASTER" not in texts(figure)


def test_load_is_judged_by_what_others_take_during_the_run_and_not_before() -> None:
    """A load average from before the first round includes the work of the measurement before."""
    record = with_runs(comparison(), others_cores=0.0)
    loaded = record.candidate.environment.model_copy(update={"load_average": 9.0})
    after = record.model_copy(update={"candidate": record.candidate.model_copy(update={"environment": loaded})})
    assert after.trust().trustworthy
    assert not any("busy before" in remark for remark in after.remarks)
    old = with_runs(after, others_cores=None)
    assert old.trust().trustworthy
    assert any("busy before the first round (load 9.0)" in remark for remark in old.remarks)


def test_a_model_that_the_caches_hold_may_pass_the_limit_of_the_memory() -> None:
    """The 498 MB of weights are read at several times the probed bandwidth."""
    assert in_cache(PAST_THE_LIMIT, 1000.0).trust().trustworthy
    assert not in_cache(PAST_THE_LIMIT, 100.0).trust().trustworthy


def test_a_record_from_before_grades_is_read() -> None:
    record = comparison()
    old = json.loads(record.model_dump_json())
    old.pop("looks")
    for side in ("baseline", "candidate"):
        old[side]["environment"].pop("cache_mb")
        for run in old[side]["runs"]:
            run.pop("others_cores")
    assert Comparison.model_validate(old) == record


def test_a_comparison_that_was_looked_at_again_has_the_wider_interval() -> None:
    record = comparison(rounds=20)
    looked = record.model_copy(update={"looks": (8, 11, 15, 20)})
    once, often = record.ratio("per_token"), looked.ratio("per_token")
    assert often.low < once.low < once.high < often.high
    assert looked.verdict is Verdict.FASTER
    assert looked.confidence == "98% over 4 looks"
    assert "98% over 4 looks" in printed(looked)
    assert "20 rounds, looked at after 8, 11, 15, 20" in printed(looked)
    assert looked.as_dict()["looks"] == [8, 11, 15, 20]
    assert "98% over 4 looks" in notes(looked)


def test_an_undecided_comparison_says_how_many_more_rounds_it_takes() -> None:
    record = comparison()
    side = record.candidate
    runs = tuple(
        run.model_copy(update={"decode_ms": tuple(step * (1 + 0.06 * (-1) ** index) for step in run.decode_ms)})
        for index, run in enumerate(side.runs)
    )
    sides = {"baseline": side, "candidate": side.model_copy(update={"runs": runs})}
    wavering = record.model_copy(update=sides | {"looks": (8,)})
    assert wavering.verdict is Verdict.UNDECIDED
    more = wavering.more_rounds
    assert more is not None
    assert more > 1
    assert wavering.as_dict()["more_rounds"] == more
    assert any(f"about {more} more rounds would decide it" in remark for remark in wavering.remarks)


def test_more_rounds_are_not_promised_where_they_would_not_help() -> None:
    assert BUSY.verdict is Verdict.UNDECIDED
    assert BUSY.more_rounds is None
    assert comparison(rounds=3).more_rounds == 3


def test_the_origin_of_a_case_is_empty_until_it_is_known() -> None:
    case = Case(model="gpt2", dtype="float32", batch=1, prompt_tokens=4, new_tokens=4, threads=2, tp=2)
    assert case.origin == ""
    assert case.cores == 4


def test_the_parts_that_hooks_replaced_are_counted_by_kind() -> None:
    record = comparison()
    hooked = record.candidate.model_copy(update={"replaced": ("2 x norm: a.*", "1 x head: lm_head", "1 x norm: b")})
    assert hooked.kinds_replaced == "3 x norm, 1 x head"
    assert "hooks of fused: 3 x norm, 1 x head" in printed(record.model_copy(update={"candidate": hooked}))
    assert "hooks of" not in printed(record)
