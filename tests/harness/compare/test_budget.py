"""A side gets the memory of its case: a side that needs more ends as out of memory, others are measured."""

import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest
import torch
from helpers.processes.children import children_that_run
from helpers.sweeps import sweep
from transformers import LlamaConfig

from labkit.harness.compare import budget
from labkit.harness.compare.budget import WATCHED, memory_budget
from labkit.harness.compare.compare import comparison_case
from labkit.harness.compare.interleave import take_turns
from labkit.harness.compare.memory_group import CGROUP, PREFIX, MemoryGroup
from labkit.harness.compare.plan import Schedule, SideSpec
from labkit.harness.compare.side_process import OutOfBudgetError, SideProcesses, WorkerError
from labkit.harness.runs import Case
from labkit.weights.checkpoint.hf_folder import write_checkpoint
from labkit.weights.source import ModelSource, RandomWeights

LIMIT = 64 << 20
TAKE = (
    "import sys; sys.stdin.readline(); taken = bytearray(int(sys.argv[1])); print(len(taken), flush=True); "
    "sys.stdin.readline()"
)


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture(params=[CGROUP, WATCHED])
def limit_kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways to limit the memory of a process."""
    memory_group = MemoryGroup.make(LIMIT)
    if memory_group is not None:
        memory_group.remove()
    elif request.param == CGROUP:
        pytest.skip("no memory cgroup can be made here")
    if request.param == WATCHED:
        monkeypatch.setattr(budget.MemoryGroup, "make", lambda limit: None)
    return str(request.param)


def groups() -> set[Path]:
    """The groups of this process; other tests that run meanwhile have their own."""
    return set(Path("/sys/fs/cgroup").rglob(f"{PREFIX}{os.getpid()}-*"))


@pytest.mark.parametrize(("size", "exceeds"), [(LIMIT // 4, False), (3 * LIMIT, True)])
def test_only_a_process_that_exceeds_the_budget_is_killed(limit_kind: str, size: int, exceeds: bool) -> None:
    before = groups()
    with ExitStack() as limits:
        with subprocess.Popen(
            [sys.executable, "-P", "-c", TAKE, str(size)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        ) as process:
            limit = limits.enter_context(memory_budget(LIMIT, (process.pid,)))
            assert limit.how == limit_kind
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(b"\n")
            process.stdin.flush()
            line = process.stdout.readline()
            assert exceeds or int(line) == size
            if exceeds:
                process.wait(30)
        assert limit.exceeded == exceeds
        assert limit.peak_bytes is None or limit.peak_bytes <= LIMIT
    assert groups() == before


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Model of 120 MB in float32; a layer is a tenth of it."""
    folder = tmp_path_factory.mktemp("model")
    config = LlamaConfig(
        vocab_size=2000, hidden_size=512, intermediate_size=1536, num_hidden_layers=8, num_attention_heads=8
    )
    write_checkpoint(ModelSource("a LLaMA", "here", config, RandomWeights(config, 0)), torch.float32, folder)
    return folder


def case_of(model: Path, memory_gb: float) -> Case:
    case = comparison_case(model=str(model), dtype="float32", batch=1, prompt=4, new=2, threads=1)
    return case.model_copy(update={"memory_gb": memory_gb})


@pytest.mark.sweep  # takes a quarter of a minute
def test_a_model_that_stays_on_the_disk_fits_where_it_is_smaller_than_its_memory(model: Path, tmp_path: Path) -> None:
    before = groups()
    schedule = Schedule(rounds=2, stages=False, scratch=tmp_path)
    (side,) = take_turns([SideSpec("hf-disk", 1)], case_of(model, 0.06), schedule).sides
    assert side.memory_limit in (CGROUP, WATCHED)
    assert side.peak_limited_mb is None or 0 < side.peak_limited_mb <= 60
    for run in side.runs:
        assert run.disk_gb_s is not None
        assert min(run.disk_gb_s) > 0
        assert run.cached_mb is None or run.cached_mb < 60
    assert side.case.memory_gb == 0.06
    assert [folder.name.rpartition("-")[0] for folder in tmp_path.iterdir()] == ["hf-disk-float32"]
    assert groups() == before


@sweep
def test_a_model_that_is_kept_in_memory_ends_as_out_of_memory(model: Path) -> None:
    before = groups()
    with pytest.raises(OutOfBudgetError, match=r"hf-eager needs more than 0\.06 GB of memory") as error_info:
        take_turns([SideSpec("hf-eager", 1)], case_of(model, 0.06), Schedule(rounds=2, stages=False))
    assert isinstance(error_info.value, WorkerError)
    assert children_that_run("labkit.harness") == []
    assert groups() == before


def test_a_process_that_ends_for_another_reason_is_not_out_of_memory() -> None:
    with SideProcesses("hf-eager", 1) as side:
        side.limit_memory(10.0)
        psutil.Process(side.pids[0]).kill()
        with pytest.raises(WorkerError, match="was killed by SIGKILL") as error_info:
            side.ask("prepare", name="hf-eager", model="tiny-gpt2", dtype="float32", seed=0)
    assert not isinstance(error_info.value, OutOfBudgetError)
