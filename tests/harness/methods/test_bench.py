"""Every cell is measured once, in a process of its own, and has an outcome; an interrupted bench can be resumed."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.processes.children import children_that_run
from helpers.sweeps import sweep

from labkit.harness.compare.sampling import Turns
from labkit.harness.methods import bench, cell
from labkit.harness.methods.bench import bench_methods, side_of
from labkit.harness.methods.cell import MethodCell
from labkit.harness.methods.grid import MethodGrid
from labkit.harness.results import load_records, load_results
from labkit.system.errors import UserError

METHODS = ("hf-eager", "fused-streamed", "llama.cpp")
SMALL: dict[str, Any] = {
    "model": "tiny-gpt2",
    "methods": METHODS,
    "prompt": 9,
    "new": 4,
    "rounds": 2,
    "threads": 1,
    "memory_gb": 0.05,  # less than the engine needs in addition to its weights
}


@pytest.fixture(autouse=True, scope="module")
def no_gpu_and_no_peers(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)
        patch.setattr(cell, "busy", lambda taken: False)  # ignores the load of this machine
        patch.setenv("LABKIT_LLAMA_CPP_PYTHON", str(tmp_path_factory.mktemp("none") / "python"))
        yield


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, list[Any]]:
    """File that Ctrl-C in the second method left, the folder of its models, and the records in the file."""
    folder = tmp_path_factory.mktemp("bench")
    file, scratch = folder / "methods.jsonl", folder / "scratch"

    def interrupt(done: float, total: float, label: str) -> None:
        if label.startswith("fused-streamed, batch 1: loading"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        bench_methods(**SMALL, output=file, scratch=scratch, progress=interrupt)
    return file, scratch, load_records(file)


@pytest.fixture(scope="module")
def resumed(interrupted: tuple[Path, Path, list[Any]]) -> tuple[MethodGrid, list[tuple[float, float, str]]]:
    file, scratch, _ = interrupted
    steps: list[tuple[float, float, str]] = []
    grid = bench_methods(**SMALL, output=file, scratch=scratch, progress=lambda *step: steps.append(step))
    return grid, steps


@sweep
def test_an_interrupt_keeps_what_was_measured_and_leaves_nothing_else(interrupted: Any) -> None:
    _, scratch, cells = interrupted
    assert [cell.place for cell in cells] == [("hf-eager", 1)]
    assert list(scratch.iterdir()) == []
    assert children_that_run("labkit.harness") == []


@sweep
def test_it_resumes_after_the_last_finished_cell(interrupted: Any, resumed: Any) -> None:
    file, scratch, before = interrupted
    grid, steps = resumed
    assert grid.cells[0] == before[0]
    assert not any(label.startswith("hf-eager") for _, _, label in steps)
    assert [done for done, _, _ in steps] == sorted(done for done, _, _ in steps)
    assert steps[-1] == (3, 3, "done")
    assert load_records(file) == list(grid.cells)
    assert list(scratch.iterdir()) == []


@sweep
def test_each_cell_has_its_outcome(resumed: Any) -> None:
    eager, streamed, llama_cpp = resumed[0].cells
    assert eager.measured is not None
    assert eager.measured.case == eager.case
    assert eager.case.memory_gb == 0.05
    assert eager.measured.memory_limit
    assert (eager.unit, "limited memory" in eager.why_rounds) == ("round", True)
    assert len(eager.measured.runs) == 2
    assert eager.measured.start_to_ready_s > 0
    assert eager.token_ms == pytest.approx(eager.measured.end_to_end_ms / 4)
    assert "the least that works" in streamed.oom
    assert "does not import llama_cpp" in llama_cpp.refused


@sweep
def test_a_cell_without_a_limit_is_measured_in_epochs(tmp_path: Path) -> None:
    file = tmp_path / "methods.jsonl"
    grid = bench_methods(
        **SMALL | {"methods": ("hf-eager", "fused"), "memory_gb": None, "new": 8, "rounds": 3}, output=file
    )
    for entry in grid.cells:
        assert entry.measured is not None
        assert (entry.unit, entry.why_rounds, len(entry.measured.runs)) == ("epoch", "", 3)
        for run in entry.measured.runs:
            assert len(run.turns) >= 4
            assert all(turn.bandwidth_gb_s for turn in run.turns)
        assert entry.interval is not None
        assert 0 < entry.interval.low < 1 < entry.interval.high
        assert entry.token_ms is not None
        assert min(entry.measured.rounds_ms("end_to_end")) <= entry.token_ms * 8
        assert entry.token_ms * 8 <= max(entry.measured.rounds_ms("end_to_end"))
    assert load_records(file) == list(grid.cells)


def test_an_interrupt_between_epochs_ends_the_bench_without_the_cell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sides that were interrupted after some epochs have a result, and a cell of fewer epochs would look finished."""
    monkeypatch.setattr(bench, "take_turns", lambda *args, **options: Turns(sides=(), tokens=(), interrupted=True))
    with pytest.raises(KeyboardInterrupt):
        bench_methods(**SMALL, output=tmp_path / "methods.jsonl")
    assert not (tmp_path / "methods.jsonl").exists()


def test_the_former_name_of_rounds_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    schedules = []

    def refused(sides: Any, case: Any, schedule: Any, **options: Any) -> None:
        schedules.append(schedule.rounds)
        raise UserError("no")

    monkeypatch.setattr(bench, "take_turns", refused)
    few = {name: value for name, value in SMALL.items() if name != "rounds"} | {"methods": ("fused",)}
    for number, counts in enumerate(({"rounds": 3}, {"cycles": 3}, {})):
        (cell,) = bench_methods(**few | counts, output=tmp_path / f"{number}.jsonl").cells
        assert cell.cycles == schedules[-1]
    assert schedules == [3, 3, 6]
    with pytest.raises(UserError, match="got rounds = 3 and cycles = 4; expected one of them"):
        bench_methods(**few, rounds=3, cycles=4, output=tmp_path / "both.jsonl")


@sweep
def test_what_is_done_is_not_measured_again_and_what_was_refused_is_tried_again(interrupted: Any, resumed: Any) -> None:
    grid = bench_methods(**SMALL, output=interrupted[0])
    assert grid.cells[:2] == resumed[0].cells[:2]
    assert grid.cells[2].created > resumed[0].cells[2].created
    few = bench_methods(**SMALL | {"methods": ("fused-streamed",)}, output=interrupted[0])
    assert few.cells == grid.cells[1:2]
    assert load_records(interrupted[0]) == list(grid.cells)


@sweep
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"new": 5}, "another case .*new_tokens 4 instead of 5.*name another file"),
        ({"model": "tiny-llama"}, "model 'tiny-gpt2' instead of 'tiny-llama'"),
        ({"memory_gb": None}, "memory_gb 0.05 instead of None"),
        ({"seed": 1, "rounds": 3}, "rounds 2 instead of 3; seed 0 instead of 1"),
    ],
)
def test_a_file_of_another_case_is_refused(
    interrupted: Any, resumed: Any, changes: dict[str, Any], message: str
) -> None:
    before = interrupted[0].read_text()
    with pytest.raises(ValueError, match=message):
        bench_methods(**SMALL | changes, output=interrupted[0])
    assert interrupted[0].read_text() == before


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"methods": ()}, r"got methods \[\] and batches \[1\]; expected at least one of each"),
        ({"methods": ("hf-eager", "fussed")}, "unknown side 'fussed' .*'fused'.*accelerate-int8"),
        ({"methods": ("fused-streamed:int5",)}, "unknown precision 'int5'"),
        ({"batches": (1, 0)}, "got batch = 0, expected at least 1"),
        ({"model": "gpt-17"}, "unknown model 'gpt-17'"),
        ({"dtype": "int3"}, "unsupported dtype 'int3'"),
        ({"rounds": 1}, "got rounds = 1, expected at least 2"),
        ({"memory_gb": -1.0}, "got memory_gb = -1"),
        ({"prompt": 10**6}, "positions"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        bench_methods(**SMALL | changes, output=tmp_path / "runs" / "methods.jsonl")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "message"), [("{", "is not a result of schema version"), ("{}\n", "is not a result of schema version")]
)
def test_a_damaged_file_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "methods.jsonl").write_text(text)
    with pytest.raises(ValueError, match=message):
        bench_methods(**SMALL, output=tmp_path / "methods.jsonl")


@sweep
def test_other_records_in_the_file_are_refused(tmp_path: Path, resumed: Any) -> None:
    measured = resumed[0].cells[0].measured
    (tmp_path / "methods.jsonl").write_text(measured.model_dump_json() + "\n")
    with pytest.raises(ValueError, match="holds other records too"):
        bench_methods(**SMALL, output=tmp_path / "methods.jsonl")
    assert len(load_results(tmp_path)) == 2


@sweep
def test_a_cell_has_one_outcome(resumed: Any) -> None:
    lines = [json.loads(cell.model_dump_json()) for cell in resumed[0].cells]
    for line in (lines[0] | {"oom": "too large"}, lines[1] | {"oom": ""}):
        with pytest.raises(ValueError, match="expected one of measured, oom and refused"):
            MethodCell.model_validate(line)


@pytest.mark.parametrize(
    ("method", "side"),
    [
        ("fused", ("fused", 4, 1)),
        ("fused-tp2", ("fused", 2, 2)),
        ("fused-int8-tp4", ("fused-int8", 1, 4)),
        ("fused-int4-64", ("fused-int4-64", 4, 1)),
        ("fused-tp8", ("fused", 1, 8)),
        ("accelerate-int8", ("bitsandbytes-int8", 4, 1)),
        ("streamed", ("fused-streamed", 4, 1)),
    ],
)
def test_methods_are_sides_whose_ranks_share_the_threads(method: str, side: tuple[str, int, int]) -> None:
    spec = side_of(method, 4)
    assert (spec.name, spec.threads, spec.ranks) == side
