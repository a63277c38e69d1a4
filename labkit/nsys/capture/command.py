"""The command lines of a capture under nsys, or under torch.profiler where nsys is missing."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Literal

from labkit.nsys.capture.redaction import without_secrets
from labkit.stages import DOMAIN, Phase
from labkit.system.asked_from import given
from labkit.system.errors import UserError

RankReports = Literal["one", "per-rank"]
CaptureSource = Literal["auto", "nsys", "torch"]
PROFILER_API = "cudaProfilerApi"
# Options of torchrun without a value. All others take the next argument as their value.
TORCHRUN_FLAGS = {
    "--standalone",
    "--no-python",
    "--no_python",
    "-m",
    "--module",
    "--run-path",
    "--run_path",
    "--use-env",
    "--pin",
    "--no-pin",
}
# Options of python with a value. All others have none.
PYTHON_VALUES = {"-W", "-X", "--check-hash-based-pycs"}


@dataclass(frozen=True)
class Window:
    """The part of a run that is captured: all of it, or one range."""

    # `MESSAGE@DOMAIN` of an NVTX range, `cudaProfilerApi` for the part between cudaProfilerStart and Stop; None: all
    name: str | None = None
    occurrence: int = 1  # which range of that name, from 1

    @classmethod
    def of_phase(cls, phase: Phase, occurrence: int = 1) -> Window:
        """All steps of a phase in a row, as labkit announces them."""
        return cls(f"{phase}@{DOMAIN}", occurrence)

    @property
    def phase(self) -> Phase | None:
        """The phase of the range, if it is labkit's range of a phase."""
        message, _, domain = (self.name or "").partition("@")
        return Phase(message) if domain == DOMAIN and message in tuple(Phase) else None


def nsys_command(
    nsys: Path,
    command: Sequence[str],
    output: Path,
    *,
    window: Window = Window(),
    ranks: RankReports = "one",
    gpu: bool = False,
    sampling: bool = False,
    temporary: Path | None = None,
) -> list[str]:
    """`command` under nsys, which writes OUTPUT.nsys-rep and OUTPUT.sqlite, with numbers if there are several.

    ranks: "one" report of all processes, or one per rank, for a command that starts with torchrun.
    gpu: trace CUDA, with the nodes of CUDA graphs.
    sampling: sample the CPUs.
    temporary: the command's folder for temporary files, if nsys itself uses another.
    """
    per_rank = ranks == "per-rank"
    profile = [
        str(nsys),
        "profile",
        f"--trace={'cuda,nvtx,cublas' if gpu else 'nvtx'}",
        f"--sample={'process-tree' if sampling else 'none'}",
        "--cpuctxsw=none",
        "--kill=none",  # the program continues when its capture range ends
        "--export=sqlite",
        "--force-overwrite=true",
        f"--output={str(output).replace('%', '%%')}{'-r%q{RANK}' if per_rank else ''}",  # %h is a host to nsys
    ]
    if gpu:
        profile.append("--cuda-graph-trace=node")
    variables = {} if temporary is None else {"TMPDIR": str(temporary)}  # of the command, not of nsys
    if window.name == PROFILER_API:
        profile.append(f"--capture-range={PROFILER_API}")
    elif window.name is not None:
        profile += ["--capture-range=nvtx", f"--nvtx-capture={window.name}"]
        variables["NSYS_NVTX_PROFILER_REGISTER_ONLY"] = "0"
    if variables:
        profile.append(f"--env-var={','.join(f'{name}={value}' for name, value in variables.items())}")
    if window.name is not None:
        end = "stop" if window.occurrence == 1 else f"repeat:{window.occurrence}"
        profile.append(f"--capture-range-end={end}")
    if not per_rank:
        return [*profile, *command]
    launcher, worker = split_torchrun(command)
    return [*launcher, "--no-python", *profile, *worker]


def torch_profiler_command(command: Sequence[str], output: Path, window: Window) -> list[str]:
    """A Python program inside torch.profiler, which writes OUTPUT.json, or OUTPUT-rN.json for each rank.

    Raises ValueError for other programs, and for an NVTX range that is not a phase, which only nsys can capture.
    """
    if window.name not in (None, PROFILER_API) and window.phase is None:
        raise UserError(
            f"got the range {window.name!r}, which only nsys can wait for; without nsys (see labkit doctor) take the "
            f"phase {' or '.join(Phase)}, or the whole run"
        )
    launcher: list[str] = []
    if is_torchrun(command):
        launcher, command = split_torchrun(command)
        launcher.append("--no-python")
    interpreter, program = split_python(command)
    part = window.phase or window.name or "all"
    child = ["-m", "labkit.nsys.capture.torch_child", str(output), part, str(window.occurrence)]
    return [*launcher, *interpreter, *child, given("source", "nsys"), *program]


def is_torchrun(command: Sequence[str]) -> bool:
    """Whether a command starts torch's launcher, by its name, as a module, or by `labkit launch`."""
    return _words_of_launcher(command) > 0


def split_torchrun(command: Sequence[str]) -> tuple[list[str], list[str]]:
    """The launcher with its options, and the command that it starts on every rank.

    Raises ValueError for a command that is not torchrun's, or that starts nothing.
    """
    if not is_torchrun(command):
        raise UserError(
            f"got {_shown(command[:2])!r}, expected a command that starts with torchrun: one report per rank"
        )
    at = words = _words_of_launcher(command)
    flags: list[str] = []
    while at < len(command) and command[at].startswith("-") and command[at] != "--":
        flags.append(command[at])
        at += 1
        if "=" not in flags[-1] and flags[-1] not in TORCHRUN_FLAGS and at < len(command):
            flags.append(command[at])
            at += 1
    program = list(command[at + ("--" in command[at : at + 1]) :])
    if not program:
        raise UserError(f"got {_shown(command)!r}, expected a script after the options of torchrun")
    head = list(command[:words])
    no_python, module = {"--no-python", "--no_python"}, {"-m", "--module"}
    options = [flag for flag in flags if flag not in no_python | module]
    if no_python & set(flags):
        return [*head, *options], program
    return [*head, *options], [sys.executable, "-u", *(["-m"] if module & set(flags) else []), *program]


def split_python(command: Sequence[str]) -> tuple[list[str], list[str]]:
    """The interpreter with its options, and the program: a script, "-m" or "-c", each with its arguments."""
    if not command or not _is_python(PurePath(command[0]).name):
        got = _shown(command[:1]) or "nothing"
        raise UserError(
            f"got the command {got!r}, expected python and a script: without nsys only Python programs can be "
            "captured; install nsys (labkit doctor says how)"
        )
    at = 1
    while at < len(command) and command[at].startswith("-") and command[at] not in ("-m", "-c"):
        at += 2 if command[at] in PYTHON_VALUES else 1
    if at >= len(command):
        raise UserError(f"got {_shown(command)!r}, expected a script after the options of python")
    return list(command[:at]), list(command[at:])


def _words_of_launcher(command: Sequence[str]) -> int:
    """The number of words that start torch's launcher, before its options; 0 for other commands."""
    name = PurePath(command[0]).name if command else ""
    if name == "torchrun":
        return 1
    if name == "labkit" and tuple(command[1:2]) == ("launch",):
        return 2
    return 3 if _is_python(name) and tuple(command[1:3]) == ("-m", "torch.distributed.run") else 0


def _shown(command: Sequence[str]) -> str:
    return " ".join(without_secrets(command))


def _is_python(name: str) -> bool:
    return name.startswith("python") or name == PurePath(sys.executable).name
