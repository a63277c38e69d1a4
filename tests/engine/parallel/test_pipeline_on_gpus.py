"""Pipeline stages on GPUs give the tokens of one process.

Without GPUs the kernels are interpreted, and gloo replaces NCCL. With two or more GPUs both are real.
"""

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.kernels.gpus import INTERPRETED, ON_GPU
from helpers.ranks import pipelined_gpus as on_gpus
from helpers.ranks.failing_ranks import ON_GPUS, check_told, told

import labkit
from labkit.engine.runners.pipeline.chooser import TIMED, UNTIMED

TIMEOUT_S = 240
PAIR = 2 * (UNTIMED + TIMED)  # tokens of two laps: one with several micro-batches, one with one
ON_TWO = [*ON_GPU, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs")]
somewhere = pytest.mark.parametrize(
    "device", [pytest.param("interpreted", marks=INTERPRETED), pytest.param("gpus", marks=ON_TWO)]
)
pytestmark = pytest.mark.timeout(300)


def launched(function: Any, *arguments: Any, **sizes: int) -> list[Any]:
    return labkit.launch(function, *arguments, **{"pp_size": 2, "timeout_s": TIMEOUT_S} | sizes)  # type: ignore[arg-type]


@pytest.mark.sweep
@somewhere
def test_every_schedule_and_every_other_call_gives_what_one_process_gives(device: str) -> None:
    """Texts of unequal lengths end at different steps, and micro-batches become fewer."""
    for rank in launched(on_gpus.every_way):
        for kind, results in rank.items():
            assert [name for name, equal in results.items() if not equal] == [], kind


@pytest.mark.sweep
@pytest.mark.parametrize("sizes", [{"pp_size": 3}, {"pp_size": 2, "tp_size": 2}], ids=["three", "two by two"])
@pytest.mark.parametrize("device", [pytest.param("interpreted", marks=INTERPRETED)])
def test_more_ranks_give_the_tokens_of_one_process(device: str, sizes: dict[str, int]) -> None:
    results = launched(on_gpus.stages, "gpt2", sizes.get("tp_size", 1), **sizes)
    assert results == [{"regrouped": True}] * len(results)


@pytest.mark.sweep
@pytest.mark.parametrize("device", [pytest.param("interpreted", marks=INTERPRETED)])
def test_rows_go_from_device_to_device_and_mistakes_to_all_ranks(device: str) -> None:
    """The rows of a step are sent once and all arrive; a failure on one rank is reported on the other."""
    first, last = launched(on_gpus.played)
    rows, prompt = 3, 9
    assert first["rows"] == (rows * (prompt + on_gpus.NEW - 1), 0)
    assert last["rows"] == (0, 0)
    for rank, results in enumerate((first, last)):
        for (failing, step), message in results["mistakes"].items():
            reason = f"ValueError: step {step} is too much"
            assert message == (reason if rank == failing else f"RankFailedError: rank {failing}: {reason}")
    assert first["equal"]
    assert last["equal"]


@pytest.mark.sweep
@somewhere
def test_keys_and_values_in_the_host_s_memory_give_the_tokens_of_one_process(device: str) -> None:
    """Rows leave a micro-batch as they end; a prompt has no more micro-batches than the steps after it."""
    for rank in launched(on_gpus.caches_on_host):
        assert rank == {"tokens": dict.fromkeys(("two", "fewer", "naive", "leaving"), True), "rows": [2, 1]}


@pytest.mark.sweep
@somewhere
def test_micro_batches_are_chosen_by_their_times(device: str) -> None:
    """The trial moves rows to one micro-batch and back, and the tokens match one process with every choice."""
    cases = {
        "one is faster": on_gpus.Timed(several_ms=2.0, one_ms=1.0, new=3 + 2 * PAIR),
        "several are faster": on_gpus.Timed(several_ms=1.0, one_ms=2.0, new=3 + PAIR),
        "rows end": on_gpus.Timed(several_ms=1.0, one_ms=1.0, new=3 + PAIR, rows_end=True),
    }
    chosen = {"one is faster": 1, "several are faster": 2, "rows end": None}
    assert launched(on_gpus.choosing, cases) == [{name: (True, count) for name, count in chosen.items()}] * 2


@pytest.mark.sweep
@pytest.mark.parametrize("device", [pytest.param("interpreted", marks=INTERPRETED)])
def test_what_fails_on_one_stage_fails_on_all_and_they_go_on(device: str) -> None:
    check_told(launched(told, 2, 1, tuple(ON_GPUS)))


@pytest.mark.sweep
@somewhere
def test_a_rank_that_is_killed_while_rows_are_under_way_ends_the_run(device: str, tmp_path: Path) -> None:
    with pytest.raises(labkit.RankError, match=r"rank 1: its process ended.* killed by SIGKILL"):
        launched(on_gpus.lost, str(tmp_path))
    assert time.time() - (tmp_path / "lost").stat().st_mtime < 10
