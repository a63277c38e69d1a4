"""Stages whose keys and values lie in files, one for each micro-batch, give the tokens of one process."""

from typing import Any

import pytest
from pipelined_caches import ROWS, every_schedule, peaks, two_by_two, two_stages
from sweeps import sweep

import labkit

pytestmark = pytest.mark.timeout(300)
TIMEOUT_S = 280
Answers = list[dict[str, Any]]
AGAIN = (True, 0)  # the tokens of one process, and no file that is left behind


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    return labkit.launch(two_stages, str(tmp_path_factory.mktemp("caches")), pp_size=2, timeout_s=TIMEOUT_S)


@sweep
def test_rows_that_end_at_different_steps_give_the_tokens_of_one_process(stages: Answers) -> None:
    """Also where those of three micro-batches are divided anew into two behind the prompt."""
    assert [rank["different"] for rank in stages] == [[]] * 2


@sweep
def test_other_calls_give_what_one_process_gives(stages: Answers) -> None:
    for rank in stages:
        assert [name for name, equal in rank["other calls"].items() if not equal] == []


@sweep
def test_rows_that_have_ended_leave_their_file_once_that_is_worth_it(stages: Answers) -> None:
    """So that steps have more rows than in memory, and fewer than if all stayed in their two micro-batches."""
    for rank in stages:
        memory, disk = rank["rows"]["memory"], rank["rows"]["disk"]
        assert sum(memory) < sum(disk) < len(disk) * ROWS // 2


@sweep
def test_all_micro_batches_have_the_slots_of_one_batch(stages: Answers) -> None:
    for rank in stages:
        assert len(rank["slots"]) == 1


@sweep
def test_a_disk_without_room_or_broken_is_told_to_all_and_they_can_go_on(stages: Answers) -> None:
    """Rows leave a file without more room."""
    for rank in stages:
        said = rank["faults"]
        for what in ("no room", "no room to join"):
            assert "UserError: kv_offload: " in said[what]
            assert "(No space left on device)" in said[what]
        assert said["leaving"] == "nothing"
        assert all(said[f"{what}, after"] == AGAIN for what in ("no room", "no room to join", "leaving"))
        assert "RunError: keys and values of layer" in said["broken"]
        assert said["broken, after"]
        assert rank["left"] == ([], [])


@pytest.mark.sweep
@pytest.mark.parametrize("count", [2, 3])
def test_every_schedule_gives_the_tokens_of_one_process(count: int, tmp_path: Any) -> None:
    found = labkit.launch(every_schedule, str(tmp_path), count, pp_size=count, timeout_s=TIMEOUT_S)
    assert found == [[]] * count


@pytest.mark.sweep
def test_stages_of_two_ranks_each_give_the_tokens_of_one_process(tmp_path: Any) -> None:
    """Where the disk of one of them has no room or breaks, all four are told and can go on."""
    for rank in labkit.launch(two_by_two, str(tmp_path), pp_size=2, tp_size=2, timeout_s=TIMEOUT_S):
        assert rank["different"] == []
        said = rank["faults"]
        assert all(
            "another rank" in said[what] or "kv_offload" in said[what] for what in ("no room", "no room to join")
        )
        assert said["leaving"] == "nothing"
        assert all(said[f"{what}, after"] == AGAIN for what in ("no room", "no room to join", "leaving"))
        assert said["broken, after"]


@pytest.mark.sweep
def test_a_rank_s_memory_does_not_grow_with_the_micro_batches(tmp_path: Any) -> None:
    """Beside slots of as many bytes each has 8 MiB to read and write through, of a cache of 94 MB."""
    for grown in labkit.launch(peaks, str(tmp_path), pp_size=2, timeout_s=TIMEOUT_S):
        assert grown["8"] < grown["1"] + 8 * (8 << 20)
        assert grown["8"] < grown["memory"] - 47e6
