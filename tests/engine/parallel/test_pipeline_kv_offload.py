"""Stages with an offloaded KV cache, in a file for each micro-batch, give the tokens of one process."""

from typing import Any

import pytest
from helpers.ranks.pipelined_caches import ROWS, every_schedule, peaks, two_by_two, two_stages
from helpers.sweeps import sweep

import labkit

pytestmark = pytest.mark.timeout(300)
TIMEOUT_S = 280
Answers = list[dict[str, Any]]
AGAIN = (True, 0)  # tokens equal, and number of open files


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    return labkit.launch(two_stages, str(tmp_path_factory.mktemp("caches")), pp_size=2, timeout_s=TIMEOUT_S)


@sweep
def test_rows_that_end_at_different_steps_give_the_tokens_of_one_process(stages: Answers) -> None:
    """Even when rows of three micro-batches are regrouped into two after the prompt."""
    assert [rank["different"] for rank in stages] == [[]] * 2


@sweep
def test_other_calls_give_what_one_process_gives(stages: Answers) -> None:
    for rank in stages:
        assert [name for name, equal in rank["other calls"].items() if not equal] == []


@sweep
def test_rows_that_have_ended_leave_their_file_once_that_is_worth_it(stages: Answers) -> None:
    """Steps have more rows than in memory, but fewer than if all rows stayed in their two micro-batches."""
    for rank in stages:
        memory, disk = rank["rows"]["memory"], rank["rows"]["disk"]
        assert sum(memory) < sum(disk) < len(disk) * ROWS // 2


@sweep
def test_all_micro_batches_have_the_slots_of_one_batch(stages: Answers) -> None:
    for rank in stages:
        assert len(rank["slots"]) == 1


@sweep
def test_a_disk_without_room_or_broken_is_told_to_all_and_they_can_go_on(stages: Answers) -> None:
    """Rows can leave a file even if the disk is full."""
    for rank in stages:
        messages = rank["faults"]
        for fault in ("no room", "no room to join"):
            assert "UserError: kv_offload: " in messages[fault]
            assert "(No space left on device)" in messages[fault]
        assert messages["leaving"] == "nothing"
        assert all(messages[f"{fault}, after"] == AGAIN for fault in ("no room", "no room to join", "leaving"))
        assert "RunError: keys and values of layer" in messages["broken"]
        assert messages["broken, after"]
        assert rank["left"] == ([], [])


@pytest.mark.sweep
@pytest.mark.parametrize("count", [2, 3])
def test_every_schedule_gives_the_tokens_of_one_process(count: int, tmp_path: Any) -> None:
    different = labkit.launch(every_schedule, str(tmp_path), count, pp_size=count, timeout_s=TIMEOUT_S)
    assert different == [[]] * count


@pytest.mark.sweep
def test_stages_of_two_ranks_each_give_the_tokens_of_one_process(tmp_path: Any) -> None:
    """If the disk of one rank is full or breaks, all four ranks report it and work afterwards."""
    for rank in labkit.launch(two_by_two, str(tmp_path), pp_size=2, tp_size=2, timeout_s=TIMEOUT_S):
        assert rank["different"] == []
        messages = rank["faults"]
        assert all(
            "another rank" in messages[fault] or "kv_offload" in messages[fault]
            for fault in ("no room", "no room to join")
        )
        assert messages["leaving"] == "nothing"
        assert all(messages[f"{fault}, after"] == AGAIN for fault in ("no room", "no room to join", "leaving"))
        assert messages["broken, after"]


@pytest.mark.sweep
def test_a_rank_s_memory_does_not_grow_with_the_micro_batches(tmp_path: Any) -> None:
    """All have the same bytes of slots. Each micro-batch has 8 MiB of buffers, and the cache has 94 MB."""
    for growth in labkit.launch(peaks, str(tmp_path), pp_size=2, timeout_s=TIMEOUT_S):
        assert growth["8"] < growth["1"] + 8 * (8 << 20)
        assert growth["8"] < growth["memory"] - 47e6
