"""The bench of models that are larger than their memory: its bars, and a page with the same figures."""

from helpers.studies.comparisons import comparison

from labkit.bench.larger import checks, page
from labkit.harness import Comparison

MS = {"llama.cpp": 300.0, "accelerate-disk": 500.0, "hf-disk": 250.0}


def comparisons(streamed_ms: float = 100.0, *, peak_mb: float = 900.0) -> list[Comparison]:
    """Comparisons of sides with 1 GB each; a step of the streamed side reads 90 MB from a disk of 1 GB/s."""
    sides = []
    for name, step_ms in (*MS.items(), ("fused-streamed", streamed_ms)):
        side = comparison().candidate
        runs = tuple(
            run.model_copy(update={"decode_ms": (step_ms, step_ms), "disk_gb_s": (1.0, 1.0), "cached_mb": 12.0})
            for run in side.runs
        )
        facts = {"name": name, "runs": runs, "peak_rss_mb": peak_mb, "memory_limit": "a memory cgroup"}
        streamed = {"streamed_mb": 90.0} if name == "fused-streamed" else {}
        sides.append(
            side.model_copy(update=facts | streamed | {"case": side.case.model_copy(update={"memory_gb": 1.0})})
        )
    *baselines, candidate = sides
    return [comparison().model_copy(update={"baseline": side, "candidate": candidate}) for side in baselines]


def test_every_other_way_is_judged_by_its_ratio_and_ours_by_its_memory() -> None:
    assert [check.met for check in checks(comparisons())] == [True, True, True, True]
    assert [check.met for check in checks(comparisons(110.0))] == [True, True, False, True]
    assert [check.met for check in checks(comparisons(peak_mb=1001.0))] == [True, True, True, False]


def test_the_page_has_the_figures_of_the_records() -> None:
    text = page(comparisons(110.0))
    for part in (
        "1.00 GB of each side",
        "a memory cgroup",
        "| 110 |",
        "82%",
        "| 12 |",
        "2.27x",
        "3 of 4 bars met",
    ):
        assert part in text
