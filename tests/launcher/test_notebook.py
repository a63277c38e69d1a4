"""`labkit.launch` in a real kernel: functions and classes of cells, output in the cell, the interrupt button."""

from collections.abc import Callable, Iterator

import psutil
import pytest
from helpers.processes.children import children_that_run
from helpers.sweeps import sweep
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager, start_new_kernel

DEFINE = """
import labkit
from dataclasses import dataclass

@dataclass
class Report:
    rank: int

def look():
    import torch.distributed as dist
    print("looking")
    return Report(dist.get_rank())
"""
USE = """
reports = labkit.launch(look)
print(reports == [Report(0), Report(1)])
"""
SPIN = """
def spin():
    import ctypes
    print("spinning")
    ctypes.PyDLL(None).sleep(120)

labkit.launch(spin)
"""

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def kernel() -> Iterator[tuple[KernelManager, BlockingKernelClient]]:
    manager, client = start_new_kernel(kernel_name="python3")
    yield manager, client
    client.stop_channels()
    manager.shutdown_kernel(now=True)


def ranks() -> list[psutil.Process]:
    """Rank processes of the kernel, which is a child of this process."""
    return children_that_run("labkit.launcher.rank")


def run(client: BlockingKernelClient, cell: str, on_line: Callable[[str], None] = lambda line: None) -> tuple[str, str]:
    """Runs a cell and returns its output and its error."""
    printed: list[str] = []

    def hear(message: dict[str, dict[str, str]]) -> None:
        if text := message["content"].get("text"):
            printed.append(text)
            on_line(text)

    reply = client.execute_interactive(cell, output_hook=hear, timeout=100)
    content = reply["content"]
    return "".join(printed), f"{content['ename']}: {content['evalue']}" if content["status"] == "error" else ""


@sweep
def test_cells_are_launched_shown_and_interrupted(kernel: tuple[KernelManager, BlockingKernelClient]) -> None:
    manager, client = kernel
    assert run(client, DEFINE) == ("", "")
    printed, error = run(client, USE)
    assert error == ""
    assert sorted(printed.splitlines()) == ["True", "[rank 0] looking", "[rank 1] looking"]

    spinning: list[psutil.Process] = []

    def interrupt(line: str) -> None:
        if "spinning" in line and not spinning:
            spinning.extend(ranks())
            manager.interrupt_kernel()

    _, error = run(client, SPIN, interrupt)
    assert error.startswith("KeyboardInterrupt")
    assert len(spinning) == 2
    assert not any(process.is_running() for process in spinning)
