"""The environment record identifies the machine, not its owner."""

import getpass
import mmap
import os
import platform
import socket
from types import SimpleNamespace

import pytest
import torch
from helpers.studies.comparisons import environment as known_environment

from labkit.harness import environment as module
from labkit.harness.environment import Environment, read_environment, read_memory, reset_peak_memory


def test_environment_names_what_affects_timings() -> None:
    environment = read_environment(threads=2)
    assert environment.threads == 2
    assert environment.cores >= 1
    assert environment.packages["torch"][0].isdigit()
    assert environment.cpu
    assert environment.cpu in environment.machine


def test_environment_tells_neither_host_nor_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """A short name such as `vm` may be part of any word, so host and user get long names."""
    host, user = "host-of-somebody", "somebody-here"
    names = os.uname()
    monkeypatch.setattr(os, "uname", lambda: os.uname_result((names.sysname, host, *names[2:])))
    monkeypatch.setattr(platform, "_uname_cache", None)
    monkeypatch.setattr(socket, "gethostname", lambda: host)
    for name in ("LOGNAME", "USER"):
        monkeypatch.setenv(name, user)
    monkeypatch.setenv("HOME", f"/home/{user}")
    assert (platform.node(), getpass.getuser()) == (host, user)
    text = read_environment(threads=1).model_dump_json()
    assert host not in text
    assert user not in text


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_none_is_named() -> None:
    environment = read_environment(threads=1)
    assert (environment.gpu, environment.gpu_memory_gb, environment.driver, environment.cuda) == (None,) * 4


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA T1")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=16 * 10**9))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(module, "_output", lambda *command: "580.1" if command[0] == "nvidia-smi" else None)


@pytest.mark.usefixtures("one_gpu")
def test_a_gpu_comes_first_on_the_machines_line() -> None:
    environment = read_environment(threads=3)
    assert (environment.gpu, environment.driver, environment.cuda) == ("NVIDIA T1", "580.1", "13.0")
    assert environment.machine.startswith(f"NVIDIA T1 (16 GB), {environment.cpu}, {environment.cores} cores")


def test_a_record_from_before_gpus_is_read_and_keeps_its_line() -> None:
    old = known_environment().model_dump(exclude={"gpu", "gpu_memory_gb", "driver", "cuda"})
    assert Environment.model_validate(old) == known_environment()
    assert known_environment().machine == "Test CPU @ 2 GHz, 2 of 2 cores, 16 GB"


def test_on_a_gpu_memory_is_that_of_its_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 3)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 5)
    assert read_memory(torch.device("cuda", 0)) == (3, 5)


def test_the_peak_sees_memory_that_is_gone_and_restarts() -> None:
    """The block is much larger than the possible errors.

    Threads that other tests left may take or free memory meanwhile, and Linux counts pages per processor in batches.
    The block is a mapping of its own: malloc might take it from memory that it keeps, and keep it afterwards.
    """
    tolerance = 32 << 20
    with mmap.mmap(-1, 256 << 20) as block:
        block[:: mmap.PAGESIZE] = bytes(len(block) // mmap.PAGESIZE)
        with_block = read_memory()
    without_block = read_memory()
    assert without_block.now <= with_block.now - (256 << 20) + tolerance
    assert without_block.peak >= with_block.now - tolerance
    reset_peak_memory()
    assert read_memory().peak <= with_block.now - (256 << 20) + tolerance
