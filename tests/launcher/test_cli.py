"""`labkit launch` and plain torchrun from the command line: exit codes, error messages, no process left running."""

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from helpers.sweeps import sweep

from labkit.cli.main import main

LABKIT = (sys.executable, "-P", "-c", "from labkit.cli.main import main; main()")
TORCHRUN = (sys.executable, "-P", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
CORES = sorted(os.sched_getaffinity(0))
REMOVED_VARIABLES = ("OMP_NUM_THREADS", "LABKIT_PIN", "GLOO_SOCKET_IFNAME")
JOIN = """
import ctypes, os, psutil, signal, sys, time, torch, torch.distributed as dist
from labkit.launcher.group import ensure_process_group

def listening():
    processes = psutil.Process(), psutil.Process().parent()
    sockets = [socket for process in processes for socket in process.net_connections("inet")]
    return "|".join(sorted({socket.laddr.ip for socket in sockets if socket.status == psutil.CONN_LISTEN}))

ensure_process_group(tp_size=2)
rank = dist.get_rank()
"""
SUM = """
total = torch.tensor([2.0**rank])
dist.all_reduce(total)
cores = "-".join(map(str, sorted(os.sched_getaffinity(0))))
facts = f"threads={torch.get_num_threads()} cores={cores} listening={listening()}"
line = f"rank={rank} sum={total.item():g} {facts} {sys.argv[1:]}\\n"
os.write(1, line.encode())  # one write, so that lines of the ranks do not mix
dist.barrier()  # the other rank still looks at the sockets of both processes
"""
RAISE = """
if rank == 1:
    raise ValueError("the second rank has had enough")
dist.barrier()
"""
EARLY = """
import os

if os.environ["RANK"] == "1":
    raise ValueError("the second rank has no data")
"""
DIE = """
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
ctypes.PyDLL(None).sleep(120)  # holds the GIL, so that no Python signal handler can run
"""
SPIN = """
os.write(1, b"ready\\n")
ctypes.PyDLL(None).sleep(120)
"""

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def temporary(tmp_path: Path) -> Iterator[Path]:
    """Folder of the ranks' temporary files. After a test it is empty and no rank is running."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    yield folder
    assert list(folder.glob("labkit-launch-*")) == []
    assert [
        process.pid for process in psutil.process_iter(["cmdline"]) if str(tmp_path) in str(process.info["cmdline"])
    ] == []


def start(*command: str | Path, temporary: Path) -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if name not in REMOVED_VARIABLES}
    return subprocess.Popen(
        command,
        env=environment | {"COLUMNS": "200", "TMPDIR": str(temporary)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(program: str, *arguments: str, temporary: Path, launcher: tuple[str, ...]) -> tuple[int, str, str]:
    script = temporary.parent / "script.py"
    script.write_text(JOIN + program)
    process = start(*launcher, script, *arguments, temporary=temporary)
    output, errors = process.communicate(timeout=100)
    return process.returncode, output, errors


def ranks_of(output: str) -> dict[str, dict[str, str]]:
    lines = [dict(re.findall(r"(\w+)=(\S+)", line)) for line in output.splitlines()]
    return {line.pop("rank"): line for line in lines if "rank" in line}


@sweep
def test_every_rank_computes_on_its_own_processors(temporary: Path) -> None:
    code, output, errors = run(SUM, "a", "--b", temporary=temporary, launcher=(*LABKIT, "launch", "--tp", "2", "--"))
    assert code == 0, errors
    assert errors == ""
    ranks = ranks_of(output)
    assert [rank["sum"] for rank in ranks.values()] == ["3", "3"]
    assert {rank["threads"] for rank in ranks.values()} == {str(max(1, len(CORES) // 2))}
    assert output.count("['a', '--b']") == 2
    # Sockets of torchrun's store and of gloo on both ranks.
    assert {rank["listening"] for rank in ranks.values()} == {"127.0.0.1"}
    if len(CORES) > 1:
        assigned_cores = [int(core) for rank in ranks.values() for core in rank["cores"].split("-")]
        assert sorted(assigned_cores) == CORES


@sweep
def test_plain_torchrun_does_as_well(temporary: Path) -> None:
    launcher = (*TORCHRUN, f"--log-dir={temporary}")
    code, output, errors = run(SUM, temporary=temporary, launcher=launcher)
    assert code == 0, errors
    assert "destroy_process_group" not in errors
    ranks = ranks_of(output)
    assert [rank["sum"] for rank in ranks.values()] == ["3", "3"]
    if len(CORES) > 1:
        assert ranks["0"]["cores"] != ranks["1"]["cores"]


def test_the_error_of_the_rank_that_failed_first_comes_last(temporary: Path) -> None:
    code, _, errors = run(RAISE, temporary=temporary, launcher=(*LABKIT, "launch", "--tp", "2", "--"))
    assert code == 1
    last = errors[errors.index("error: ") :]
    assert last.startswith("error: rank 1 failed")
    assert last.rstrip().endswith("ValueError: the second rank has had enough")
    assert "Root Cause" not in errors


@sweep
def test_a_rank_that_fails_before_the_ranks_meet_is_not_waited_for(temporary: Path) -> None:
    script = temporary.parent / "script.py"
    script.write_text(EARLY + JOIN)
    process = start(*LABKIT, "launch", "--tp", "2", "--", script, temporary=temporary)
    _, errors = process.communicate(timeout=50)  # less than the 60 s that ranks have for meeting
    assert process.returncode == 1
    assert errors[errors.index("error: ") :].startswith("error: rank 1 failed")
    assert errors.rstrip().endswith("ValueError: the second rank has no data")


@sweep  # a cheaper test of `labkit.launch` covers the same
def test_a_killed_rank_ends_one_that_spins_in_c(temporary: Path) -> None:
    launcher = (*LABKIT, "launch", "--tp", "2", "--no-pin", "--threads", "1")
    code, _, errors = run(DIE, temporary=temporary, launcher=launcher)
    assert code == 1
    assert errors.rstrip().splitlines()[-1].startswith("error: rank 1 failed (killed by SIGKILL)")


@sweep
def test_ctrl_c_ends_all_ranks(temporary: Path) -> None:
    script = temporary.parent / "script.py"
    script.write_text(JOIN + SPIN)
    process = start(*LABKIT, "launch", "--tp", "2", script, temporary=temporary)
    assert process.stdout is not None
    assert [process.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors.rstrip().endswith("interrupted by SIGINT; all ranks of this machine have ended")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--tp", "2", "absent.py"), "no such file"),
        (("--tp", "0", __file__), "got --tp 0"),
        (("--tp", "2", "--nodes", "2", __file__), "without --rendezvous"),
        (("--tp", "2", "--rendezvous", "here", __file__), "expected HOST:PORT"),
        (("--tp", "2", "--rendezvous", "127.0.0.1:{port}", __file__), "is in use; take another one"),
        (("--tp", "2", "--threads", "0", __file__), "--threads"),
        (("--tp", "2", "--start-timeout", "0", __file__), "expected a number of seconds above 0"),
        (("--tp", "2"), "Missing argument"),
    ],
)
def test_a_mistake_is_explained_before_anything_starts(
    arguments: tuple[str, ...],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        monkeypatch.setattr(sys, "argv", ["labkit", "launch", *(argument.format(port=port) for argument in arguments)])
        monkeypatch.setenv("COLUMNS", "200")
        monkeypatch.chdir(tmp_path)
        with pytest.raises(SystemExit) as exit_info:
            main()
    assert exit_info.value.code == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert "Traceback" not in printed.err


def test_more_ranks_than_cores_is_worth_a_note_and_a_rendezvous_out_of_reach_an_error(tmp_path: Path) -> None:
    ranks = len(CORES) + 1
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    options = ("--nodes", "2", "--node-rank", "1", "--rendezvous", f"127.0.0.1:{port}", "--timeout", "0.5")
    process = start(*LABKIT, "launch", "--tp", str(2 * ranks), *options, __file__, temporary=tmp_path)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert f"note: {ranks} ranks share {len(CORES)} cores" in errors
    assert f"the rendezvous 127.0.0.1:{port} was not reached within 0.5 s" in errors
