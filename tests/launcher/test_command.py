"""Arguments and environment of torchrun, and requests that are refused before it starts."""

import os
import sys
from pathlib import Path

import pytest

from labkit.launcher.command import World, environment, program, torchrun_arguments
from labkit.launcher.rendezvous import Rendezvous
from labkit.launcher.shares import PIN
from labkit.launcher.start import START_TIMEOUT, start_timeout

MEETING = Rendezvous("127.0.0.1", 29500)
CORES = len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"tp": 0}, "got --tp 0, expected at least 1"),
        ({"tp": 2, "pp": 0}, "got --pp 0 --tp 2, expected at least 1"),
        ({"tp": 1, "pp": 3, "nodes": 2}, "got --pp 3 --tp 1 on --nodes 2.*--pp times --tp that --nodes divides"),
        ({"tp": 3, "nodes": 2}, "got --tp 3 on --nodes 2, expected the same number of ranks on each node"),
        ({"tp": 2, "nodes": 0}, "--nodes 0"),
        ({"tp": 2, "nodes": 2, "node_rank": 2}, "got --node-rank 2, expected 0 to 1"),
        ({"tp": 2, "nodes": 2}, "without --rendezvous, expected HOST:PORT"),
    ],
)
def test_sizes_that_do_not_fit_together_are_refused(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        World(**sizes)  # type: ignore[arg-type]


def test_one_machine_meets_on_a_free_port() -> None:
    line = torchrun_arguments(World(2), ["python", "x.py"], 60)
    assert {"--rdzv-backend=labkit-loopback", "--nnodes=1", "--nproc-per-node=2"} <= set(line)
    assert line[line.index("--no-python") + 1] == sys.executable
    assert line[-2:] == ["python", "x.py"]


def test_stages_times_the_ranks_of_each_are_started() -> None:
    assert "--nproc-per-node=6" in torchrun_arguments(World(3, pp=2), ["x"], 60)


def test_every_machine_starts_its_part() -> None:
    line = torchrun_arguments(World(4, nodes=2, node_rank=1, rendezvous=MEETING), ["x"], 60)
    assert {"--nnodes=2", "--node-rank=1", "--nproc-per-node=2", "--master-addr=127.0.0.1"} <= set(line)
    assert {"--master-port=29500", "--rdzv-conf=timeout=60"} <= set(line)


def test_threads_are_the_processors_shared_out_unless_the_user_has_set_them() -> None:
    assert environment(World(2), None, pin=True, base={})["OMP_NUM_THREADS"] == str(max(1, CORES // 2))
    assert environment(World(10_000), None, pin=True, base={})["OMP_NUM_THREADS"] == "1"
    assert environment(World(2), None, pin=True, base={"OMP_NUM_THREADS": "7"})["OMP_NUM_THREADS"] == "7"
    assert environment(World(2), 3, pin=True, base={"OMP_NUM_THREADS": "7"})["OMP_NUM_THREADS"] == "3"


def test_what_the_user_has_set_stays() -> None:
    assert environment(World(2), None, pin=True, base={"GLOO_SOCKET_IFNAME": "eth7"})["GLOO_SOCKET_IFNAME"] == "eth7"
    assert PIN not in environment(World(2), None, pin=True, base={})
    assert environment(World(2), None, pin=False, base={})[PIN] == "0"


def test_the_limit_for_start_and_meeting_reaches_the_ranks() -> None:
    variables = environment(World(2), None, pin=True, base={START_TIMEOUT: "7"}, start_timeout_s=2.5)
    assert start_timeout(variables) == 2.5
    assert start_timeout(environment(World(2), None, pin=True, base={START_TIMEOUT: "7"})) == 7
    assert start_timeout(environment(World(2), None, pin=True, base={})) == 60
    for wrong in ("soon", "0", "-1", "nan", "inf"):
        with pytest.raises(ValueError, match=f"got {START_TIMEOUT}={wrong}, expected a number of seconds above 0"):
            start_timeout({START_TIMEOUT: wrong})


def test_a_script_a_module_or_any_program_is_started(tmp_path: Path) -> None:
    script = tmp_path / "x.py"
    script.touch()
    assert program([str(script), "--a"]) == [sys.executable, "-u", str(script), "--a"]
    assert program(["pkg.mod", "--a"], module=True) == [sys.executable, "-u", "-m", "pkg.mod", "--a"]
    assert program(["./run", "--a"], no_python=True) == ["./run", "--a"]


def test_a_missing_script_is_named() -> None:
    with pytest.raises(ValueError, match=r"got the script 'absent\.py', and there is no such file"):
        program(["absent.py"])
