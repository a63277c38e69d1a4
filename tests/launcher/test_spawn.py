"""`labkit.launch`: results by rank, the first cause of a failure, and no process or file left over."""

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import labkit
from labkit.launcher.command import FOLDERS
from labkit.system.owned_folder import remove_abandoned

pytestmark = pytest.mark.timeout(120)
PRESSED = """
import labkit, os, signal, threading, time

def press(line):
    if "ready 0" in line:
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()

def spin():
    import ctypes, torch.distributed as dist
    print("ready", dist.get_rank())
    ctypes.PyDLL(None).sleep(120)

try:
    labkit.launch(spin, echo=press)
except KeyboardInterrupt:
    print("all ended")
"""


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    yield
    assert list(tmp_path.iterdir()) == []
    assert [
        process.pid for process in psutil.process_iter(["cmdline"]) if str(tmp_path) in str(process.info["cmdline"])
    ] == []


def test_results_come_by_rank_exactly_and_prints_with_the_rank(capsys: pytest.CaptureFixture[str]) -> None:
    """The function is a closure over the caller's tensor, as a cell of a notebook would define it."""
    weights = torch.randn(5, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)

    def split(scale: float, *, words: dict[str, int]) -> tuple[torch.Tensor, dict[str, int], int]:
        import torch.distributed as dist

        total = weights[dist.get_rank() :] * scale
        rank_count = torch.ones(1)
        dist.all_reduce(rank_count)
        sys.stdout.write(f"sum {rank_count.item()}\n")
        os.write(2, b"aside\n")
        return total, words, torch.get_num_threads()

    results = labkit.launch(split, 3.0, words={"a": 1}, tp_size=2, threads=1)
    for rank, (total, words, threads) in enumerate(results):
        torch.testing.assert_close(total, weights[rank:] * 3.0, rtol=0, atol=0)
        assert words == {"a": 1}
        assert threads == 1
    lines = capsys.readouterr().out.splitlines()
    assert sorted(lines) == ["[rank 0] aside", "[rank 0] sum 2.0", "[rank 1] aside", "[rank 1] sum 2.0"]


def test_an_error_comes_with_its_rank_type_and_traceback_while_others_wait() -> None:
    def fail() -> None:
        import torch.distributed as dist

        if dist.get_rank() == 1:
            raise KeyError("layer.7")
        dist.barrier()

    with pytest.raises(labkit.RankError, match=r"^rank 1: KeyError: 'layer\.7'") as raised:
        labkit.launch(fail, echo=lambda line: None)
    error = raised.value
    assert (error.rank, error.error_type, error.reason) == (1, "KeyError", "'layer.7'")
    assert 'raise KeyError("layer.7")' in error.rank_traceback
    assert __file__ in error.rank_traceback


def crash(signal_number: int) -> Any:
    def run() -> None:
        import ctypes

        import torch.distributed as dist

        if dist.get_rank() == 0:
            ctypes.PyDLL(None).sleep(120)  # holds the GIL, so that no Python signal handler can run
        sys.stdout.write("last words\n")
        if signal_number == 0:
            os._exit(0)
        os.kill(os.getpid(), signal_number)

    return run


@pytest.mark.parametrize(
    ("signal_number", "reason"),
    [
        pytest.param(signal.SIGKILL, "killed by SIGKILL", id="killed", marks=pytest.mark.sweep),
        pytest.param(signal.SIGSEGV, "killed by SIGSEGV", id="crashed"),
        pytest.param(0, "exit code 0", id="left", marks=pytest.mark.sweep),
    ],
)
def test_a_rank_that_dies_ends_the_others_even_in_c(signal_number: int, reason: str) -> None:
    with pytest.raises(labkit.RankError, match=reason) as raised:
        labkit.launch(crash(int(signal_number)), echo=lambda line: None)
    assert (raised.value.rank, raised.value.error_type) == (1, None)
    assert "last words" in raised.value.rank_traceback
    if signal_number == signal.SIGSEGV:
        assert "Fatal Python error: Segmentation fault" in raised.value.rank_traceback


@pytest.mark.sweep  # it waits for a quarter of a minute
def test_a_run_that_takes_too_long_says_where_it_stood() -> None:
    def never_ending_story() -> None:
        import ctypes

        import torch.distributed as dist

        if dist.get_rank() == 1:
            ctypes.PyDLL(None).sleep(120)
        dist.barrier()

    with pytest.raises(TimeoutError, match="after 15 s") as raised:
        labkit.launch(never_ending_story, timeout_s=15, echo=lambda line: None)
    assert str(raised.value).count("never_ending_story") == 2


def test_a_rank_that_is_stopped_before_the_ranks_meet_is_named() -> None:
    def stop_rank_1() -> None:
        while not (matches := [process for process in ranks() if process.environ().get("RANK") == "1"]):
            time.sleep(0.01)
        matches[0].suspend()

    stopping = threading.Thread(target=stop_rank_1)
    stopping.start()
    with pytest.raises(labkit.RankError, match=r"^rank 1: its process, \d+, is stopped") as raised:
        labkit.launch(print, echo=lambda line: None)
    stopping.join()
    assert raised.value.rank == 1


def test_the_next_run_sweeps_what_a_killed_one_left(tmp_path: Path) -> None:
    """The ranks of the killed run could not clean up either. The folder of a live run stays."""
    program = "import labkit, time; labkit.launch(time.sleep, 100, echo=print)"
    with subprocess.Popen([sys.executable, "-P", "-c", program]) as running:
        while len(ranks()) < 2:
            time.sleep(0.01)
        folders = list(tmp_path.glob("labkit-launch-*"))
        remove_abandoned(FOLDERS, tmp_path)
        assert list(tmp_path.iterdir()) == folders
        running.kill()
    while ranks():
        time.sleep(0.01)
    assert list(tmp_path.iterdir()) == folders
    remove_abandoned(FOLDERS, tmp_path)


def ranks() -> list[psutil.Process]:
    """Rank processes that this test has started."""
    folder = tempfile.gettempdir()
    words = ((process, " ".join(process.info["cmdline"] or [])) for process in psutil.process_iter(["cmdline"]))
    return [process for process, command in words if "labkit.launcher.rank" in command and folder in command]


def test_ctrl_c_ends_all_ranks(tmp_path: Path) -> None:
    process = subprocess.run(
        [sys.executable, "-P", "-c", PRESSED], capture_output=True, text=True, timeout=100, check=False
    )
    assert process.stdout == "all ended\n", process.stderr


def test_what_cannot_be_sent_is_refused_either_way() -> None:
    lock = threading.Lock()
    with pytest.raises(ValueError, match="cannot be sent to the process that runs it"):
        labkit.launch(lambda: lock)
    with pytest.raises(labkit.RankError, match="the result, of type lock, cannot be sent back"):
        labkit.launch(lambda: threading.Lock(), tp_size=1, echo=lambda line: None)


@pytest.mark.parametrize("sizes", [{"tp_size": 0}, {"threads": 0}, {"timeout_s": -1}, {"start_timeout_s": 0}])
def test_sizes_that_cannot_be_are_refused(sizes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"expected (more than 0|at least 1)"):
        labkit.launch(print, **sizes)


def test_the_environment_sets_the_limit_until_ranks_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LABKIT_START_TIMEOUT", "soon")
    with pytest.raises(ValueError, match="got LABKIT_START_TIMEOUT=soon, expected a number of seconds above 0"):
        labkit.launch(print)
