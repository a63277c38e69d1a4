"""Whether a process runs, is stopped or has ended, as the system tells it."""

from __future__ import annotations

from pathlib import Path

STOPPED = "T"  # by SIGSTOP, or Ctrl-Z at its terminal; a debugger that holds a process makes it "t"
ENDED = "XZ"


def process_state(pid: int) -> str:
    """The letter of /proc; "?" where it can't be read."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "X" if Path("/proc/self").exists() else "?"
    except PermissionError:
        return "?"
