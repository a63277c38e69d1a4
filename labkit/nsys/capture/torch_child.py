"""Runs a Python program inside torch.profiler: `-m labkit.nsys.capture.torch_child OUTPUT PHASE OCCURRENCE PROGRAM...`.

It stands in for nsys where that is not installed. PHASE is "all", or the phase ("prefill" or "decode") whose run number
OCCURRENCE is captured. PROGRAM is a script, `-m module` or `-c code`, with its arguments. Writes OUTPUT.json, and under
torchrun OUTPUT-rN.json.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path
from typing import Any

from labkit.stages import PHASE_WATCHERS, Phase


def main() -> None:
    output, phase, occurrence, *program = sys.argv[1:]
    rank = os.environ.get("RANK")
    path = Path(f"{output}-r{rank}.json" if rank else f"{output}.json")
    capture = WindowedProfiler(Phase(phase) if phase in tuple(Phase) else None, int(occurrence))
    try:
        _run(program)
    finally:
        capture.write(path)


class WindowedProfiler:
    """torch.profiler, which runs from now to the end of the process, or for one run of a phase."""

    def __init__(self, phase: Phase | None, occurrence: int) -> None:
        from torch.profiler import ProfilerActivity, profile

        self._profiler: Any = profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])
        self._phase, self._ahead, self._state = phase, occurrence, "waiting"
        if phase is None:
            self._start()
        else:
            PHASE_WATCHERS.append(self._watch)

    def _watch(self, phase: Phase, begins: bool) -> None:
        if phase != self._phase:
            return
        if begins:
            self._ahead -= 1
            if self._ahead == 0:
                self._start()
        elif self._state == "running":
            self._stop()

    def _start(self) -> None:
        self._profiler.start()
        self._state = "running"

    def _stop(self) -> None:
        self._profiler.stop()
        self._state = "done"

    def write(self, path: Path) -> None:
        """Nothing is written where the phase never came."""
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
