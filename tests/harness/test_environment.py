"""The environment record tells the machine apart, not its owner."""

import getpass
import platform

import numpy as np

from labkit.harness.environment import read_environment, read_memory, reset_peak_memory


def test_environment_names_what_moves_timings() -> None:
    environment = read_environment(threads=2)
    assert environment.threads == 2
    assert environment.cores >= 1
    assert environment.packages["torch"][0].isdigit()
    assert environment.cpu
    assert environment.cpu in environment.machine


def test_environment_tells_neither_host_nor_user() -> None:
    text = read_environment(threads=1).model_dump_json()
    assert platform.node() not in text or len(platform.node()) < 4
    assert getpass.getuser() not in text or len(getpass.getuser()) < 5


def test_the_peak_sees_memory_that_is_gone_and_restarts() -> None:
    reset_peak_memory()
    before = read_memory()
    block = np.ones(64 << 20, dtype=np.uint8)
    del block
    assert read_memory().peak - before.now >= 60 << 20
    reset_peak_memory()
    assert read_memory().peak - read_memory().now < 16 << 20
