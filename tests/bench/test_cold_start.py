"""The bench of cold starts: its phases, its page, and real processes of both sides."""

import time
from pathlib import Path

import pytest
import torch
from helpers.studies.comparisons import environment
from helpers.sweeps import sweep

from labkit.bench import cold_start
from labkit.bench.cold_start import FUSED, VANILLA, measure, page, rows, start
from labkit.harness import load_records
from labkit.harness.cold_start_record import PHASES, ColdStart
from labkit.system.errors import UserError
from labkit.system.whole_file import write_whole
from labkit.weights.checkpoint.hf_folder import write_checkpoint
from labkit.weights.resolve import resolve


def record() -> ColdStart:
    """Three rounds of two sides: the prompt of 128 tokens takes twice as long in vanilla."""
    runs_s = {
        VANILLA: {128: ((5.0, 1.0, 0.4, 1.6),) * 3, 2_000: ((5.0, 1.0, 4.0, 2.0), (5.0, 1.2, 4.0, 2.0))},
        FUSED: {128: ((2.0, 1.0, 0.2, 0.8),) * 3, 2_000: ((2.0, 1.0, 1.0, 1.0), (2.0, 1.0, 1.0, 1.4))},
    }
    return ColdStart(
        model="tiny",
        origin="random weights",
        dtype="bfloat16",
        threads=2,
        new_tokens=8,
        environment=environment(),
        runs_s=runs_s,
    )


def test_phases_are_medians_and_add_up() -> None:
    of = record()
    assert of.phases_s(VANILLA, 2_000) == pytest.approx({"import": 5.0, "load": 1.1, "prompt": 4.0, "tokens": 2.0})
    assert of.whole_s(FUSED, 128) == pytest.approx([4.0] * 3)
    assert of.ratio(VANILLA, FUSED, 128).value == pytest.approx(2.0)


def test_the_record_comes_back_and_its_page_has_a_row_for_each_side_and_prompt(tmp_path: Path) -> None:
    of = record()
    write_whole(tmp_path / "one.jsonl", of.model_dump_json() + "\n")
    assert load_records(tmp_path) == [of]
    assert [row[:2] for row in rows(of)] == [
        ("128", VANILLA), ("128", FUSED), ("2000", VANILLA), ("2000", FUSED)
    ]  # fmt: skip
    assert "| 128 | hf-eager | 5.00 | 1.00 | 0.40 | 1.60 | 8.00 | 2.00x [2.00, 2.00] |" in page(of)


@sweep
def test_real_processes_go_through_every_phase(tmp_path: Path) -> None:
    write_checkpoint(resolve("tiny-llama"), torch.bfloat16, tmp_path)
    begin = time.monotonic()
    runs = measure({VANILLA: tmp_path, FUSED: tmp_path}, [9, 40], new=5, rounds=1, threads=2)
    elapsed = time.monotonic() - begin
    starts = [phases for side in runs.values() for rounds in side.values() for phases in rounds]
    assert len(starts) == 4
    assert all(len(phases) == len(PHASES) and min(phases) > 0 for phases in starts)
    assert sum(map(sum, starts)) < elapsed


@sweep
def test_a_side_that_cannot_start_is_named(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="hf-eager could not start"):
        start(VANILLA, tmp_path / "nothing", 4, 2, 1)


def test_prompts_beyond_the_positions_are_refused_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cold_start, "measure", lambda *_: pytest.fail("it started"))
    with pytest.raises(UserError, match=r"got prompts of up to 9000 tokens and 64 new ones, expected at most \d+"):
        cold_start.main(model="tiny-llama", prompts="128,9000")
