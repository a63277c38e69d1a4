"""The process group has the requested number of torchrun's processes, or the error says what to type."""

import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from labkit.launcher.group import TORCHRUN, ensure_process_group
from labkit.launcher.loopback import loopback_store
from labkit.launcher.meeting import meet
from labkit.launcher.start import START_TIMEOUT
from labkit.system.errors import RunError


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
    for command in (
        "labkit launch --tp 2 -- script.py",
        "torchrun --nproc-per-node 2",
        "labkit.launch(function, tp_size",
    ):
        assert command in str(raised.value)
    with pytest.raises(ValueError, match="tensor parallelism needs several processes"):
        ensure_process_group()
    assert not dist.is_initialized()


def test_stages_are_named_with_the_ranks_of_each() -> None:
    with pytest.raises(ValueError, match="pp_size=3, tp_size=2 needs 6 processes, and this one was started") as raised:
        ensure_process_group(tp_size=2, pp_size=3)
    for command in (
        "labkit launch --pp 3 --tp 2 -- script.py",
        "--nproc-per-node 6",
        "launch(function, pp_size=3, tp_size=2)",
    ):
        assert command in str(raised.value)


def test_another_number_of_processes_is_named_with_both_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in zip(TORCHRUN, ("0", "4", "127.0.0.1", "1"), strict=True):
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=r"got tp_size=2 in a run of 4 processes, expected 2: pass tp_size=4"):
        ensure_process_group(tp_size=2)
    assert not dist.is_initialized()


@pytest.mark.usefixtures("alone")
def test_a_group_that_is_there_is_kept_and_has_to_fit() -> None:
    before = dist.group.WORLD
    ensure_process_group(tp_size=1)
    assert dist.group.WORLD is before
    with pytest.raises(ValueError, match="got tp_size=2 in a run of 1 process, expected 2"):
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


@pytest.mark.parametrize("method", ["env", "file"])
def test_a_rank_that_does_not_come_is_named(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store's server runs, as under torchrun; rank 1 of 3 joins, ranks 0 and 2 do not."""
    server = loopback_store()
    values = ("1", "3", "127.0.0.1", str(server.port))
    for name, value in (*zip(TORCHRUN, values, strict=True), ("TORCHELASTIC_USE_AGENT_STORE", "True")):
        monkeypatch.setenv(name, value)
    init_method = "env://" if method == "env" else f"file://{tmp_path}/store"
    with pytest.raises(RunError, match=r"^ranks 0, 2 have not met the others within 0\.3 s.*--start-timeout"):
        ensure_process_group(tp_size=3, start_timeout_s=0.3, init_method=init_method)
    assert not dist.is_initialized()


def test_a_store_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    for name, value in zip(TORCHRUN, ("1", "2", "127.0.0.1", str(port)), strict=True):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv(START_TIMEOUT, "0.5")
    with pytest.raises(RunError, match=r"^rank 1 did not reach the store of the run within 0\.5 s.*rank 0"):
        ensure_process_group(tp_size=2)


def test_ranks_that_come_late_are_waited_for(tmp_path: Path) -> None:
    def join(rank: int) -> None:
        meet(dist.FileStore(f"{tmp_path}/store", 2), rank, 2, timeout_s=60)

    late = threading.Timer(0.2, join, [1])
    late.start()
    join(0)
    late.join()


def test_the_store_of_one_machine_listens_on_loopback_alone() -> None:
    store = loopback_store()
    listening = [
        connection.laddr
        for connection in psutil.Process().net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert [address.ip for address in listening if address.port == store.port] == ["127.0.0.1"]
