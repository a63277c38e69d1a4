"""nsys with its agent: a process of its own that nsys starts, and may lose before the program begins."""

from __future__ import annotations

from collections.abc import Callable

from labkit.nsys.process import Ended
from labkit.nsys.shared_memory import sweep_shared_memory

LOST_AGENT = (  # nsys ends with one of them
    *("End of file", "Agent launcher failed."),
    *("Local Endpoint is not available.", "Connection reset by peer", "sem_open"),
)
THROWN = (
    "QuadD",
    "Dynamic exception type: ",
    "std::exception::what: ",
    "[boost::errinfo",
)  # it may say before where in its own code
ATTEMPTS = 3  # another capture that begins at the same time can cost a second agent, too
OTHERS_S = 30.0  # for captures of other processes to end


def run_with_agent(run: Callable[[], Ended]) -> Ended:
    """What a `run` of nsys gives; where nsys lost its agent, of a further one, up to ATTEMPTS in all."""
    sweep_shared_memory()
    ended = run()
    for _ in range(1, ATTEMPTS):
        if not lost_agent(ended):
            break
        sweep_shared_memory(patience_s=OTHERS_S)  # what is broken goes only when no other capture uses it
        ended = run()
    return ended


def lost_agent(ended: Ended) -> bool:
    """Whether an nsys that nobody stopped failed before the program began: then nobody but nsys has said a word."""
    if ended.exit_code == 0 or ended.interrupted or ended.late or not ended.said:
        return False
    *before, last = ended.said
    return last.endswith(LOST_AGENT) and all(any(mark in line for mark in THROWN) for line in before)
