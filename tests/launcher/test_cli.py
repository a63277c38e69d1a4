"""`labkit launch` and plain torchrun as a user meets them: exit codes, last words, and nothing left running."""

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
from sweeps import sweep

from labkit.cli.main import main

LABKIT = (sys.executable, "-P", "-c", "from labkit.cli.main import main; main()")
TORCHRUN = (sys.executable, "-P", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
CORES = sorted(os.sched_getaffinity(0))
TOLD = ("OMP_NUM_THREADS", "LABKIT_PIN", "GLOO_SOCKET_IFNAME")
JOIN = """
import ctypes, os, psutil, signal, sys, time, torch, torch.distributed as dist
from labkit.launcher.group import ensure_process_group

def heard():
    both = psutil.Process(), psutil.Process().parent()
    sockets = [each for process in both for each in process.net_connections("inet")]
    return "|".join(sorted({each.laddr.ip for each in sockets if each.status == psutil.CONN_LISTEN}))

ensure_process_group(tp_size=2)
rank = dist.get_rank()
"""
SUM = """
total = torch.tensor([2.0**rank])
dist.all_reduce(total)
cores = "-".join(map(str, sorted(os.sched_getaffinity(0))))
here = f"threads={torch.get_num_threads()} cores={cores} heard={heard()}"
found = f"rank={rank} sum={total.item():g} {here} {sys.argv[1:]}\\n"
os.write(1, found.encode())  # in one piece, whatever the other rank writes
dist.barrier()  # the other rank looks at the sockets of this one's parent, and its own
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
ctypes.PyDLL(None).sleep(120)  # with the GIL: no handler of Python's can run
"""
SPIN = """
os.write(1, b"ready\\n")
ctypes.PyDLL(None).sleep(120)
"""

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def temporary(tmp_path: Path) -> Iterator[Path]:
    """Where the ranks' files go, which are gone when a test ends, as the ranks are."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    yield folder
    assert list(folder.glob("labkit-launch-*")) == []
    assert [each.pid for each in psutil.process_iter(["cmdline"]) if str(tmp_path) in str(each.info["cmdline"])] == []


def start(*command: str | Path, temporary: Path) -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if name not in TOLD}
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
    said, errors = process.communicate(timeout=100)
    return process.returncode, said, errors


def ranks_of(said: str) -> dict[str, dict[str, str]]:
    lines = [dict(re.findall(r"(\w+)=(\S+)", line)) for line in said.splitlines()]
    return {line.pop("rank"): line for line in lines if "rank" in line}


@sweep
def test_every_rank_computes_on_its_own_processors(temporary: Path) -> None:
    code, said, errors = run(SUM, "a", "--b", temporary=temporary, launcher=(*LABKIT, "launch", "--tp", "2", "--"))
    assert code == 0, errors
    assert errors == ""
    ranks = ranks_of(said)
    assert [rank["sum"] for rank in ranks.values()] == ["3", "3"]
    assert {rank["threads"] for rank in ranks.values()} == {str(max(1, len(CORES) // 2))}
    assert said.count("['a', '--b']") == 2
    assert {rank["heard"] for rank in ranks.values()} == {"127.0.0.1"}  # torchrun's store, and gloo of both ranks
    if len(CORES) > 1:
        shared_out = [int(core) for rank in ranks.values() for core in rank["cores"].split("-")]
        assert sorted(shared_out) == CORES


@sweep
def test_plain_torchrun_does_as_well(temporary: Path) -> None:
    launcher = (*TORCHRUN, f"--log-dir={temporary}")
    code, said, errors = run(SUM, temporary=temporary, launcher=launcher)
    assert code == 0, errors
    assert "destroy_process_group" not in errors
    ranks = ranks_of(said)
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
    _, errors = process.communicate(timeout=50)  # less than the 60 s that ranks may take to meet
    assert process.returncode == 1
    assert errors[errors.index("error: ") :].startswith("error: rank 1 failed")
    assert errors.rstrip().endswith("ValueError: the second rank has no data")


@sweep  # `labkit.launch` has the same, and costs less
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
        monkeypatch.setattr(sys, "argv", ["labkit", "launch", *(each.format(port=port) for each in arguments)])
        monkeypatch.setenv("COLUMNS", "200")
        monkeypatch.chdir(tmp_path)
        with pytest.raises(SystemExit) as ended:
            main()
    assert ended.value.code == 2
    said = capsys.readouterr()
    assert message in said.err
    assert "Traceback" not in said.err


def test_more_ranks_than_cores_is_worth_a_note_and_a_rendezvous_out_of_reach_an_error(tmp_path: Path) -> None:
    ranks = len(CORES) + 1
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    where = ("--nodes", "2", "--node-rank", "1", "--rendezvous", f"127.0.0.1:{port}", "--timeout", "0.5")
    process = start(*LABKIT, "launch", "--tp", str(2 * ranks), *where, __file__, temporary=tmp_path)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert f"note: {ranks} ranks share {len(CORES)} cores" in errors
    assert f"the rendezvous 127.0.0.1:{port} was not reached within 0.5 s" in errors
