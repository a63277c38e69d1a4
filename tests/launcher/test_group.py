"""The process group: of torchrun's processes, as many as were asked for, or an error that says what to type."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from labkit.launcher.group import TORCHRUN, ensure_process_group


@pytest.fixture(autouse=True)
def outside_of_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in TORCHRUN:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_process_of_its_own_is_told_how_to_start_several() -> None:
    with pytest.raises(ValueError, match="tp_size=2 needs 2 processes, and this one was started alone") as raised:
        ensure_process_group(tp_size=2)
    for way in (
        "labkit launch --tp 2 -- script.py",
        "torchrun --nproc-per-node 2",
        "labkit.launch(function, tp_size",
    ):
        assert way in str(raised.value)
    with pytest.raises(ValueError, match="tensor parallelism needs several processes"):
        ensure_process_group()
    assert not dist.is_initialized()


def test_another_number_of_processes_is_named_with_both_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in zip(TORCHRUN, ("0", "4", "127.0.0.1", "1"), strict=True):
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=r"got tp_size=2 in a run of 4 processes; expected as many: pass tp_size=4"):
        ensure_process_group(tp_size=2)
    assert not dist.is_initialized()


@pytest.mark.usefixtures("alone")
def test_a_group_that_is_there_is_kept_and_has_to_fit() -> None:
    before = dist.group.WORLD
    ensure_process_group(tp_size=1)
    assert dist.group.WORLD is before
    with pytest.raises(ValueError, match="got tp_size=2 in a run of 1 process;"):
        ensure_process_group(tp_size=2)


def test_other_devices_are_refused() -> None:
    with pytest.raises(ValueError, match="got device_type 'xpu', expected one of cpu, cuda"):
        ensure_process_group("xpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_rank_without_a_gpu_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in zip(TORCHRUN, ("0", "2", "127.0.0.1", "1"), strict=True):
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="on a machine with 0 GPUs"):
        ensure_process_group("cuda", tp_size=2)
