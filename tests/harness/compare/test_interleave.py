"""Two sides in two processes do the same work, are measured separately, and always end cleanly."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from helpers.sweeps import sweep

from labkit.harness import Comparison, WorkerError, load_records
from labkit.harness.compare.compare import compare
from labkit.harness.compare.sampling import first_difference
from labkit.harness.compare.side_process import SideProcess, SideProcesses
from labkit.harness.turns.looks import FEWEST_PAIRS

MODEL = "tiny-gpt2"
SMALL: dict[str, Any] = {"model": MODEL, "batch": 2, "prompt": 9, "new": 5, "threads": 1, "rounds": 3}


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Comparison, Path, list[tuple[int, int, str]]]:
    folder = tmp_path_factory.mktemp("runs")
    steps: list[tuple[int, int, str]] = []
    record = compare(**SMALL, output=folder, progress=lambda *step: steps.append(step))
    return record, folder, steps


def children() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


def test_greedy_tokens_of_both_sides_are_equal(compared: tuple[Comparison, Path, Any]) -> None:
    assert compared[0].tokens_equal
    assert compared[0].first_difference is None


def test_both_sides_ran_the_same_case_as_often(compared: tuple[Comparison, Path, Any]) -> None:
    record = compared[0]
    assert record.baseline.case == record.candidate.case
    assert [run.round for run in record.baseline.runs] == [run.round for run in record.candidate.runs] == [0, 1, 2]
    for side in (record.baseline, record.candidate):
        assert all(len(run.turns) >= FEWEST_PAIRS for run in side.runs)
        assert side.placed_anew
        assert side.peak_rss_mb is not None
        assert side.peak_rss_mb > 0
        assert side.work is not None
        assert side.first_run_s is not None
        assert side.weights == "float32"


def test_where_the_weights_come_from_is_said(compared: tuple[Comparison, Path, Any]) -> None:
    assert "random weights" in compared[0].as_dict()["origin"]


def test_stages_of_both_sides_come_from_an_extra_run(compared: tuple[Comparison, Path, Any]) -> None:
    record = compared[0]
    for side in (record.baseline, record.candidate):
        assert side.stage_run is not None
        assert side.stage_run not in side.runs
        assert {"qkv", "attention", "mlp", "lm_head"} <= {str(stage.stage) for stage in side.stages}


def test_the_record_is_on_disk(compared: tuple[Comparison, Path, Any]) -> None:
    record, folder, _ = compared
    assert load_records(folder) == [record]
    assert len(list(folder.iterdir())) == 1


def test_progress_counts_up_to_its_total(compared: tuple[Comparison, Path, Any]) -> None:
    steps = compared[2]
    assert [done for done, _, _ in steps] == [0, 1, 2, 4, 6, 8, 9, 10]  # an epoch is a step of each side
    assert {total for _, total, _ in steps} == {10}


def test_the_figures_are_plain_json(compared: tuple[Comparison, Path, Any]) -> None:
    figures = compared[0].as_dict()
    assert json.loads(json.dumps(figures)) == figures


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "gpt-17"}, "gpt-17"),
        (
            {"baseline": "hf-lazy"},
            r"unknown side 'hf-lazy' \(did you mean .*'hf-eager'.*\?\); expected one of hf-eager",
        ),
        ({"candidate": "fast"}, "unknown side 'fast'"),
        ({"dtype": "int3"}, "unsupported dtype 'int3'; expected one of float32"),
        ({"threads": 0}, "got threads = 0, expected at least 1"),
        ({"batch": 0}, "got batch = 0"),
        ({"prompt": 0}, "got prompt = 0"),
        ({"new": 1}, "got new = 1, expected at least 2"),
        ({"rounds": 1}, "got rounds = 1, expected at least 2"),
        ({"prompt": 10**6}, "positions"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    before = children()
    with pytest.raises(ValueError, match=message):
        compare(**{**SMALL, "output": tmp_path / "runs", **changes})
    assert children() <= before
    assert not (tmp_path / "runs").exists()


@sweep
@pytest.mark.parametrize(("when", "kept"), [("epoch 2", 0), ("epoch 3", 2), ("stages of fused", 3)])
def test_an_interrupt_ends_the_workers_and_keeps_what_is_enough_for_an_interval(
    when: str, kept: int, tmp_path: Path
) -> None:
    """The timed runs stay without their stages. tests/cli covers an interrupt while the workers load."""
    before = children()

    def interrupt(done: float, total: float, label: str) -> None:
        if label.startswith(when):
            raise KeyboardInterrupt

    if kept:
        record = compare(**SMALL, output=tmp_path, progress=interrupt)
        assert record.rounds == kept
        assert f"interrupted after {kept} epochs" in record.remarks
        assert load_records(tmp_path) == [record]
    else:
        with pytest.raises(KeyboardInterrupt):
            compare(**SMALL, output=tmp_path, progress=interrupt)
        assert list(tmp_path.iterdir()) == []
    assert children() <= before


@pytest.fixture(scope="module")
def side() -> Iterator[SideProcess]:
    with SideProcess("hf-eager", threads=1) as process:
        yield process


PREPARE: dict[str, Any] = {"name": "hf-eager", "model": MODEL, "dtype": "float32", "seed": 0, "options": {}}
LOAD: dict[str, Any] = {"batch": 1, "prompt": 4, "new": 3, "threads": 1}


@sweep
def test_the_same_seed_gives_the_same_tokens(side: SideProcess) -> None:
    side.ask("prepare", **PREPARE)
    side.ask("load", **LOAD)
    assert side.ask("run", seed=3)["tokens"] == side.ask("run", seed=3)["tokens"]


@sweep
def test_a_short_warm_up_leaves_the_runs_as_long_as_they_were(side: SideProcess) -> None:
    side.ask("prepare", **PREPARE)
    side.ask("load", warm_up=2, **LOAD | {"new": 5})
    assert len(side.ask("run", seed=1)["times"]["decode_ms"]) == 4


@sweep
def test_a_users_error_in_a_worker_is_the_users_error_here(side: SideProcess) -> None:
    with pytest.raises(ValueError, match=r"hf-eager: .*no-such-model"):
        side.ask("prepare", **PREPARE | {"model": "no-such-model"})


def test_a_killed_worker_is_reported_with_its_signal() -> None:
    with SideProcess("hf-eager", threads=1) as side:
        os.kill(side.pid, signal.SIGKILL)
        with pytest.raises(WorkerError, match=r"killed by SIGKILL.*memory"):
            side.ask("prepare", **PREPARE)


def test_a_side_that_hangs_is_named_and_ended() -> None:
    pids: list[int] = []

    def compare() -> None:
        with SideProcesses("hf-eager", 1) as side:
            pids.extend(side.pids)
            os.kill(side.pids[0], signal.SIGSTOP)
            side.ask("prepare", within_s=1.0, **PREPARE)

    with pytest.raises(WorkerError, match=r"^hf-eager did not answer within 1 s"):
        compare()
    assert not psutil.pid_exists(pids[0])


@sweep
def test_a_worker_ends_with_its_parent() -> None:
    """The parent is killed with SIGKILL, so that it cannot clean up."""
    code = (
        "from labkit.harness.compare.side_process import SideProcess; import time\n"
        "side = SideProcess('hf-eager', threads=1); print(side.pid, flush=True); time.sleep(60)"
    )
    parent = subprocess.Popen([sys.executable, "-P", "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    worker = psutil.Process(int(parent.stdout.readline()))
    parent.kill()
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 60
    while worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE


def test_the_first_difference_is_found_in_any_sequence() -> None:
    tokens = [[[1, 2, 3], [4, 5, 6]]]
    assert first_difference(tokens, tokens) is None
    assert first_difference(tokens, [[[1, 2, 3], [4, 9, 6]]]) == 1
    assert first_difference(tokens, [[[1, 2, 3, 4], [4, 5, 6, 7]]]) == 3
    assert first_difference([[[1]], [[1, 2]]], [[[1]], [[1, 3]]]) == 1  # generations of different lengths
