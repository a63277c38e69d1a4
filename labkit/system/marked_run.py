"""Runs whose processes carry a mark in their environment, and end when the process that started the run ends.

A child process can end with its parent, but nsys starts a daemon, and the daemon starts the program: no signal of the
parent reaches them. So a watcher process waits at a pipe until the owner of the run is done or dead. If the owner died,
the watcher ends every process that has the mark and removes the folders of the run.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

MARK = "LABKIT_RUN"  # in the environment of a run's processes
DONE = b"done"
ASK_S = 2.0  # for a process to end after SIGTERM
KILL_S = 10.0  # for a process to end after SIGKILL


@contextmanager
def ended_with_owner(mark: str, folders: Sequence[Path] = ()) -> Iterator[None]:
    """Inside this context the death of this process ends all processes with LABKIT_RUN=`mark` and removes `folders`.

    An exception that leaves the context ends the processes too.
    """
    watcher = subprocess.Popen(
        [sys.executable, "-P", "-m", "labkit.system.marked_run", mark, *map(str, folders)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # signals to this process's group do not reach it
    )
    try:
        yield
    except BaseException:
        end_marked(mark)
        raise
    finally:
        with suppress(BrokenPipeError):
            watcher.communicate(DONE)


def end_marked(mark: str) -> None:
    """Ends every process with LABKIT_RUN=`mark` and its children, until none is left.

    Processes get SIGTERM first and are killed only if they do not end: an nsys that is killed while it holds a lock in
    shared memory keeps every later nsys from starting.
    """
    asked_until = time.monotonic() + ASK_S
    while running := _marked(mark):
        ask = time.monotonic() < asked_until
        for process in running:
            with suppress(psutil.NoSuchProcess):
                process.terminate() if ask else process.kill()
        _, alive = psutil.wait_procs(running, ASK_S if ask else KILL_S)
        if alive and not ask:  # it waits for a device, and ends when the device answers
            return


def _marked(mark: str) -> set[psutil.Process]:
    processes = set()
    for process in psutil.process_iter(["environ", "status"]):
        if (process.info["environ"] or {}).get(MARK) == mark and process.info["status"] != psutil.STATUS_ZOMBIE:
            processes.add(process)
            with suppress(psutil.Error):
                processes.update(process.children(recursive=True))
    return processes


def _watch(mark: str, folders: Sequence[str]) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if sys.stdin.buffer.read() == DONE:
        return
    end_marked(mark)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    _watch(sys.argv[1], sys.argv[2:])
