"""The bench of loading: its bars, and a page with the figures of the record."""

import math
import sys
from pathlib import Path

import pytest
from helpers.studies.comparisons import environment

from labkit.bench import loading as load_bench
from labkit.bench.loading import checks, page, save_packed, sizes, write_model
from labkit.bench.targets import LlamaSizes
from labkit.harness import load_records
from labkit.harness.load_record import ONE_FILE, OWN_FILES, LoadMeasurement, PackedMemory
from labkit.system.errors import RunError
from labkit.system.whole_file import write_whole


def measurement(one_s: float = 3.1, *, peak: int = 1_240, int8: int = 1_140) -> LoadMeasurement:
    """Measurement of two ranks and of one process in int8.

    Each rank holds 1,000 bytes, and its largest tensor has 100 bytes. The second rank is the slower one.
    """
    return LoadMeasurement(
        ranks=2,
        dtype="bfloat16",
        model_bytes=2_000,
        share_bytes=(1_000, 1_000),
        largest_bytes=(100, 100),
        environment=environment(),
        rounds_s={ONE_FILE: ((1.0, one_s),) * 3, OWN_FILES: ((0.5, 1.0),) * 3},
        peak_bytes={ONE_FILE: (900, peak), OWN_FILES: (1_100, 1_000)},
        precisions={"int8": PackedMemory(peak=int8, packed=1_000)},
    )


def test_ranks_are_judged_by_the_slowest_and_the_largest() -> None:
    assert [check.met for check in checks(measurement())] == [True, True, True, True]
    assert [check.met for check in checks(measurement(2.9))] == [False, True, True, True]
    assert [check.met for check in checks(measurement(peak=1_260))] == [True, True, False, True]
    assert [check.met for check in checks(measurement(int8=1_160))] == [True, True, True, False]


def test_the_record_comes_back_and_its_page_says_the_same(tmp_path: Path) -> None:
    record = measurement()
    write_whole(tmp_path / "one.jsonl", record.model_dump_json() + "\n")
    assert load_records(tmp_path) == [record]
    for part in ("3.10x", "1.14 of the share", "1.14 of the packed weights", "≤ 1.15: met"):
        assert part in page(record)


def test_ranks_that_fail_are_reported_with_their_last_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho out of luck >&2\nexit 3\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(RunError, match="2 ranks could not save the model\nout of luck"):
        save_packed(tmp_path, tmp_path / "packed", 2)


def test_the_model_has_the_size_that_was_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shares of its ranks add up to the whole."""
    monkeypatch.setattr(load_bench, "LOADED", LlamaSizes(hidden=64, intermediate=160, vocabulary=320, heads=16))
    size = write_model(tmp_path / "one", 1e-3)
    assert size == pytest.approx(1e6, rel=0.1)
    shares = [share for share, _ in sizes(tmp_path / "one", 2)]
    assert math.isclose(sum(shares), size, rel_tol=0.05)
