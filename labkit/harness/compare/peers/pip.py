"""Calls pip to install a peer: in a session of its own, with its output in a log."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
from collections.abc import Mapping
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TextIO

from labkit.system.errors import RunError, UserError
from labkit.system.lifetime import kill_session
from labkit.system.marked_run import MARK
from labkit.system.progress import Progress

COMPILED = re.compile(r"^\s*\[(\d+)/(\d+)\] ")  # how ninja counts the files of a build
NOT_THE_CAUSE = re.compile(r"WARNING|NOTE|note:|hint:|\[notice\]|╰─>|\[end of output\]", re.IGNORECASE)
CAUSES = {
    r"No space left on device|Errno 28": "the disk is full; make room, or name a folder on another disk (LABKIT_CACHE)",
    r"NewConnectionError|ConnectTimeout|ConnectionError|NameResolutionError|Max retries": "no package index answers; "
    "is there a network?",
    r"No matching distribution": "no package index has it for this Python and this machine",
    r"CMAKE_(C|CXX)_COMPILER|No CMAKE": "the C++ compiler does not work; Debian, Ubuntu: apt-get install g++",
    r"fatal error: Killed signal": "memory ran out; compile fewer files at once (CMAKE_BUILD_PARALLEL_LEVEL=1)",
}


class Pip:
    """Installs packages into folders. `scratch` is a folder for temporary files, and `mark` is the mark of the run
    (`labkit.system.marked_run`).

    RunError for a call that fails, with its cause, if it is known, and the path of the log.
    """

    def __init__(self, log: TextIO, scratch: Path, mark: str, progress: Progress) -> None:
        # PathFinder alone: setuptools' finder would take the lookup for an import of pip and stop replacing distutils,
        # which breaks PyTorch's compiler in this process.
        if PathFinder.find_spec("pip") is None:
            raise UserError(f"{sys.executable} has no pip; add it: {sys.executable} -m ensurepip")
        self._log, self._scratch, self._mark, self._progress = log, scratch, mark, progress

    def install(self, requirements: tuple[str, ...], folder: Path) -> None:
        """Installs exactly these packages, from wheels and without their dependencies."""
        arguments = ("install", "--no-deps", "--only-binary", ":all:", "--target", str(folder), *requirements)
        self._run(f"downloading {', '.join(requirements)}", arguments)

    def download_source(self, requirement: str) -> Path:
        """Downloads and unpacks the sources of a package. Returns their folder, which is temporary."""
        folder = self._scratch / "source"
        folder.mkdir()
        arguments = ("download", "--no-deps", "--no-binary", ":all:", "--dest", str(folder))
        self._run(f"downloading the sources of {requirement}", (*arguments, requirement))
        (archive,) = folder.iterdir()
        with tarfile.open(archive) as opened:
            opened.extractall(folder, filter="data")
        (sources,) = (path for path in folder.iterdir() if path.is_dir())
        return sources

    def build(self, source: Path, folder: Path, environment: Mapping[str, str]) -> None:
        """Compiles the package in the folder `source`, and installs it into `folder`."""
        arguments = ("install", "--verbose", "--no-deps", "--target", str(folder), str(source))
        self._run(f"compiling {source.name}", arguments, environment)

    def _run(self, action: str, arguments: tuple[str, ...], environment: Mapping[str, str] | None = None) -> None:
        self._progress(0, 1, action)
        common = ("--no-input", "--disable-pip-version-check", "--progress-bar", "off", "--retries", "1")
        command = [sys.executable, "-P", "-m", "pip", arguments[0], *common, *arguments[1:]]
        self._log.write(f"{' '.join(command)}\n")
        output: list[str] = []
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=os.environ | {MARK: self._mark, "TMPDIR": str(self._scratch)} | dict(environment or {}),
            start_new_session=True,  # Ctrl-C reaches only this process, which then ends pip and its children
        )
        assert process.stdout is not None
        try:
            for line in process.stdout:
                self._log.write(line)
                output.append(line.strip())
                if counted := COMPILED.match(line):
                    self._progress(int(counted[1]), int(counted[2]), action)
        except BaseException:
            kill_session(process)
            raise
        finally:
            process.stdout.close()
            self._log.flush()
        if process.wait():
            raise RunError(f"{action} failed: {cause(output)}; all that pip printed is in {self._log.name}")


def cause(output: list[str]) -> str:
    """Cause of a failure, from the lines that pip printed: an explanation if it is known, else the last error."""
    text = "\n".join(output)
    for pattern, meaning in CAUSES.items():
        if re.search(pattern, text):
            return meaning
    errors = [line for line in output if "error" in line.lower() and not NOT_THE_CAUSE.search(line)]
    return (errors or [line for line in output if line] or ["it said nothing"])[-1]
