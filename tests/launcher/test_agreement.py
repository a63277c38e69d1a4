"""If ranks differ, every rank raises an error that says so, before anything is computed."""

from pathlib import Path

import pytest
import torch.distributed as dist
from helpers.sweeps import sweep

import labkit
from labkit.launcher.agreement import check_agreement, versions

SAME: dict[str, object] = {"model": "f00", "options": {"dtype": "int8", "groups": [1, 2]}, "torch": "2.13"}


def test_versions_are_those_that_change_what_is_computed() -> None:
    first = versions()
    assert list(first) == ["labkit", "kernels", "torch", "transformers", "python"]
    assert first == versions()


def test_one_rank_agrees_with_itself_and_needs_plain_data(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        check_agreement(SAME)
        with pytest.raises(TypeError, match="JSON"):
            check_agreement({"model": object()})
    finally:
        dist.destroy_process_group()


@sweep
@pytest.mark.timeout(120)
def test_every_rank_names_the_differences_and_who_has_them() -> None:
    cases: list[list[dict[str, object]]] = [
        [SAME, SAME, SAME],
        [SAME, SAME, SAME | {"model": "bad"}],
        [SAME, SAME | {"options": {"dtype": "float32", "groups": [1, 2]}}, SAME],
        [SAME | {"extra": 1}, SAME, SAME | {"extra": 1}],
        [{name: f"{name}{rank}" for name in "abcde"} for rank in range(3)],
    ]

    def compare() -> list[str]:
        import torch.distributed as dist

        from labkit.launcher.agreement import check_agreement

        messages = []
        for case in cases:
            try:
                check_agreement(case[dist.get_rank()])
                messages.append("")
            except ValueError as error:
                messages.append(str(error))
        return messages

    messages, *of_other_ranks = labkit.launch(compare, tp_size=3)
    assert of_other_ranks == [messages, messages]
    assert messages[0] == ""
    assert 'model is "f00" on ranks 0, 1 and "bad" on rank 2. Start every rank' in messages[1]
    assert 'options.dtype is "int8" on ranks 0, 2 and "float32" on rank 1. Start' in messages[2]
    assert "extra is 1 on ranks 0, 2 and not given on rank 1. Start" in messages[3]
    assert 'a is "a0" on rank 0 and "a1" on rank 1 and "a2" on rank 2; b is' in messages[4]
    assert "and 2 more. Start" in messages[4]
