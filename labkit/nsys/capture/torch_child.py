"""Runs a Python program inside torch.profiler: `-m labkit.nsys.capture.torch_child OUTPUT PART OCCURRENCE ASK PROGRAM`.

It replaces nsys where nsys is not installed. PART is "all", or the phase ("prefill" or "decode") whose run number
OCCURRENCE is captured, or "cudaProfilerApi": what the program runs between torch.cuda.profiler.start() and stop(), the
pair of calls number OCCURRENCE. ASK says how the caller asks for nsys. PROGRAM is a script, `-m module` or `-c code`,
with its arguments. Writes OUTPUT.json, and under torchrun OUTPUT-rN.json.

PyTorch has one profiler in a process at a time, and crashes if a second one ends before the first. A program that
starts its own while this one runs is therefore ended with a message. Forked processes are not recorded; each notes
itself in the file that LABKIT_STEP_TIMES names.
"""

from __future__ import annotations

import atexit
import os
import runpy
import sys
import traceback
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from labkit.nsys.capture.command import PROFILER_API
from labkit.stages import PHASE_WATCHERS, Phase, note_fork

STARTERS = {  # functions that start profilers, by the module from which they are called
    "torch.autograd.profiler": ("_prepare_profiler", "_enable_profiler"),
    "torch.autograd.profiler_legacy": ("_enable_profiler_legacy",),
}
ANOTHER = (
    "got a program with a torch.profiler of its own, and PyTorch has one at a time: labkit's, which records this run; "
    "remove the program's, or profile it under nsys ({ask})"
)


def main() -> None:
    output, part, occurrence, ask, *program = sys.argv[1:]
    rank = os.environ.get("RANK")
    path = Path(f"{output}-r{rank}.json" if rank else f"{output}.json")
    capture = WindowedProfiler(part, int(occurrence), ANOTHER.format(ask=ask))
    own = os.getpid()
    os.register_at_fork(after_in_child=note_fork)
    try:
        _run(program)
    finally:
        if os.getpid() != own:
            _end_fork(sys.exc_info()[1])
        capture.write(path)


def _end_fork(error: BaseException | None) -> None:
    """Ends a forked process as Python does, without waiting for the profiler's threads, which only its parent has."""
    code = error.code if isinstance(error, SystemExit) else error and 1
    if error is not None and not isinstance(error, SystemExit):
        traceback.print_exception(error)
    elif isinstance(code, str):
        sys.stderr.write(f"{code}\n")
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


class WindowedProfiler:
    """torch.profiler for a part of the process.

    The part is all of it from now on ("all"), one run of a phase, or the time between two calls of the program
    ("cudaProfilerApi").

    another: the message for a program that starts a profiler of its own.
    """

    def __init__(self, part: str, occurrence: int, another: str) -> None:
        import torch.cuda.profiler
        from torch.profiler import ProfilerActivity, profile

        self._profiler: Any = profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])
        self._part, self._ahead, self._state, self._another = part, occurrence, "waiting", another
        self._refuse_another()
        if part == PROFILER_API:
            torch.cuda.profiler.start, torch.cuda.profiler.stop = self._begin, self._end
        elif part in tuple(Phase):
            PHASE_WATCHERS.append(self._watch)
        else:
            self._start()

    def _watch(self, phase: Phase, begins: bool) -> None:
        if phase == self._part:
            (self._begin if begins else self._end)()

    def _begin(self) -> None:
        self._ahead -= 1
        if self._ahead == 0:
            self._start()

    def _end(self) -> None:
        if self._state == "running":
            self._stop()

    def _refuse_another(self) -> None:
        def refusing(start: Callable[..., Any]) -> Callable[..., Any]:
            def refuse_or_start(*arguments: Any, **options: Any) -> Any:
                if self._state == "running":
                    raise SystemExit(self._another)
                return start(*arguments, **options)

            return refuse_or_start

        for name, starters in STARTERS.items():
            module = import_module(name)
            for starter in starters:
                setattr(module, starter, refusing(getattr(module, starter)))

    def _start(self) -> None:
        from torch.autograd import _profiler_enabled

        if _profiler_enabled():
            raise SystemExit(self._another)
        self._profiler.start()
        self._state = "running"

    def _stop(self) -> None:
        self._profiler.stop()
        self._state = "done"

    def write(self, path: Path) -> None:
        """Writes the trace, unless the part never began."""
        if self._state == "running":
            self._stop()
        if self._state == "done":
            self._profiler.export_chrome_trace(str(path))


def _run(program: list[str]) -> None:
    if program[0] == "-c":
        sys.argv = ["-c", *program[2:]]
        sys.path.insert(0, "")
        exec(compile(program[1], "<string>", "exec"), {"__name__": "__main__"})
    elif program[0] == "-m":
        sys.argv = program[1:]
        sys.path.insert(0, os.getcwd())
        runpy.run_module(program[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = program
        sys.path.insert(0, str(Path(program[0]).resolve().parent))
        runpy.run_path(program[0], run_name="__main__")


if __name__ == "__main__":
    main()
