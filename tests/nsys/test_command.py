"""Command lines of the profilers, and refused commands."""

import sys
from pathlib import Path

import pytest

from labkit.nsys.capture.command import (
    PROFILER_API,
    Window,
    is_torchrun,
    nsys_command,
    split_python,
    split_torchrun,
    torch_profiler_command,
)
from labkit.stages import Phase
from labkit.system.asked_from import from_command_line

NSYS, OUT = Path("/opt/nsys"), Path("/out/report")
SCRIPT = ["python", "train.py", "--lr", "1"]


def test_the_command_follows_the_options_of_nsys_unchanged() -> None:
    line = nsys_command(NSYS, SCRIPT, OUT)
    assert line[:2] == [str(NSYS), "profile"]
    assert line[-4:] == SCRIPT
    assert all(option.startswith("--") for option in line[2:-4])
    assert "--trace=nvtx" in line
    assert "--output=/out/report" in line


def test_on_a_gpu_cuda_and_the_nodes_of_graphs_are_traced() -> None:
    assert {"--trace=cuda,nvtx,cublas", "--cuda-graph-trace=node"} <= set(nsys_command(NSYS, SCRIPT, OUT, gpu=True))


def test_a_phase_is_captured_by_its_range() -> None:
    line = nsys_command(NSYS, SCRIPT, OUT, window=Window.of_phase(Phase.DECODE))
    assert {"--capture-range=nvtx", "--nvtx-capture=decode@labkit", "--capture-range-end=stop"} <= set(line)
    assert "--env-var=NSYS_NVTX_PROFILER_REGISTER_ONLY=0" in line
    assert "--kill=none" in line


def test_a_later_occurrence_repeats_until_then() -> None:
    line = nsys_command(NSYS, SCRIPT, OUT, window=Window(PROFILER_API, 3))
    assert {f"--capture-range={PROFILER_API}", "--capture-range-end=repeat:3"} <= set(line)


@pytest.mark.parametrize("name", [None, "decode@other", "step@labkit", PROFILER_API])
def test_other_ranges_are_no_phase(name: str | None) -> None:
    assert Window(name).phase is None
    assert Window.of_phase(Phase.PREFILL).phase is Phase.PREFILL


@pytest.mark.parametrize(
    ("command", "launcher", "worker"),
    [
        (
            ["torchrun", "--nproc-per-node", "2", "--standalone", "x.py", "-v"],
            ["torchrun", "--nproc-per-node", "2", "--standalone"],
            [sys.executable, "-u", "x.py", "-v"],
        ),
        (
            ["/bin/torchrun", "--nnodes=2", "-m", "pkg", "a"],
            ["/bin/torchrun", "--nnodes=2"],
            [sys.executable, "-u", "-m", "pkg", "a"],
        ),
        (["torchrun", "--no-python", "./run", "-m"], ["torchrun"], ["./run", "-m"]),
        (
            ["python3", "-m", "torch.distributed.run", "--nproc-per-node=2", "x.py"],
            ["python3", "-m", "torch.distributed.run", "--nproc-per-node=2"],
            [sys.executable, "-u", "x.py"],
        ),
        (
            ["labkit", "launch", "--tp", "2", "--no-pin", "--", "x.py", "--tp", "1"],
            ["labkit", "launch", "--tp", "2", "--no-pin"],
            [sys.executable, "-u", "x.py", "--tp", "1"],
        ),
        (["labkit", "launch", "--tp=2", "x.py"], ["labkit", "launch", "--tp=2"], [sys.executable, "-u", "x.py"]),
    ],
)
def test_torchrun_is_split_from_what_it_starts(command: list[str], launcher: list[str], worker: list[str]) -> None:
    assert is_torchrun(command)
    assert split_torchrun(command) == (launcher, worker)
    line = nsys_command(NSYS, command, OUT, ranks="per-rank")
    assert line[: len(launcher) + 1] == [*launcher, "--no-python"]
    assert "--output=/out/report-r%q{RANK}" in line
    assert line[-len(worker) :] == worker


@pytest.mark.parametrize("command", [SCRIPT, ["torchrun"], ["torchrun", "--nproc-per-node", "2"]])
def test_what_starts_no_ranks_is_refused(command: list[str]) -> None:
    with pytest.raises(ValueError, match="torchrun"):
        nsys_command(NSYS, command, OUT, ranks="per-rank")


@pytest.mark.parametrize(
    ("command", "interpreter", "program"),
    [
        (["python", "x.py", "-u"], ["python"], ["x.py", "-u"]),
        (["/bin/python3.12", "-u", "-X", "dev", "-m", "pkg"], ["/bin/python3.12", "-u", "-X", "dev"], ["-m", "pkg"]),
        (["python3", "-c", "print()"], ["python3"], ["-c", "print()"]),
    ],
)
def test_python_is_split_from_its_program(command: list[str], interpreter: list[str], program: list[str]) -> None:
    assert split_python(command) == (interpreter, program)
    line = torch_profiler_command(command, OUT, Window.of_phase(Phase.DECODE, 2))
    words = ["-m", "labkit.nsys.capture.torch_child", str(OUT), "decode", "2", "source='nsys'"]
    assert line == [*interpreter, *words, *program]
    with from_command_line():
        assert "--source nsys" in torch_profiler_command(command, OUT, Window.of_phase(Phase.DECODE, 2))


def test_torch_profiler_goes_into_every_rank() -> None:
    line = torch_profiler_command(["torchrun", "--nproc-per-node=2", "x.py"], OUT, Window())
    assert line[:3] == ["torchrun", "--nproc-per-node=2", "--no-python"]
    assert line[3:7] == [sys.executable, "-u", "-m", "labkit.nsys.capture.torch_child"]
    assert line[7:] == [str(OUT), "all", "1", "source='nsys'", "x.py"]


@pytest.mark.parametrize("command", [[], ["./server"], ["python"], ["python", "-u"], ["python", "-X", "dev"]])
def test_without_nsys_only_python_programs_can_be_captured(command: list[str]) -> None:
    with pytest.raises(ValueError, match="expected"):
        torch_profiler_command(command, OUT, Window())


def test_without_nsys_a_program_can_mark_what_is_captured() -> None:
    line = torch_profiler_command(SCRIPT, OUT, Window(PROFILER_API))
    at = line.index(str(OUT))
    assert line[at : at + 3] == [str(OUT), PROFILER_API, "1"]


def test_without_nsys_only_phases_can_be_waited_for() -> None:
    with pytest.raises(ValueError, match="only nsys can wait"):
        torch_profiler_command(SCRIPT, OUT, Window("step@mine"))


def test_a_folder_with_a_percent_sign_is_the_folder_that_it_says() -> None:
    """nsys replaces %h by the host and %q{...} by a variable."""
    line = nsys_command(NSYS, ["torchrun", "x.py"], Path("/tmp/100%h/%q{HOME}"), ranks="per-rank")
    assert "--output=/tmp/100%%h/%%q{HOME}-r%q{RANK}" in line
