"""Runs of nsys with its agent, a separate process that nsys starts and may lose before the program begins."""

from __future__ import annotations

from collections.abc import Callable

from labkit.nsys.process import Ended
from labkit.nsys.shared_memory import sweep_shared_memory

LOST_AGENT = (  # the end of nsys's last line
    *("End of file", "Agent launcher failed."),
    *("Local Endpoint is not available.", "Connection reset by peer", "sem_open"),
)
THROWN = (
    "QuadD",
    "Dynamic exception type: ",
    "std::exception::what: ",
    "[boost::errinfo",
)  # in the lines before it, which name a place in nsys's own code
ATTEMPTS = 3  # another capture that begins at the same time can cost a second agent, too
OTHERS_S = 30.0  # for captures of other processes to end


def run_with_agent(run: Callable[[], Ended]) -> Ended:
    """The result of a `run` of nsys. A run that lost its agent is repeated, up to ATTEMPTS runs in all."""
    sweep_shared_memory()
    ended = run()
    for _ in range(1, ATTEMPTS):
        if not lost_agent(ended):
            break
        sweep_shared_memory(patience_s=OTHERS_S)  # a broken segment can be removed only when no other capture uses it
        ended = run()
    return ended


def lost_agent(ended: Ended) -> bool:
    """Whether nsys failed by itself before the program began. All lines of the output are then nsys's own."""
    if ended.exit_code == 0 or ended.interrupted or ended.late or not ended.said:
        return False
    *before, last = ended.said
    return last.endswith(LOST_AGENT) and all(any(mark in line for mark in THROWN) for line in before)
