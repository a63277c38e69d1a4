"""Whether a process runs, is stopped or has ended, from /proc."""

from __future__ import annotations

from pathlib import Path

STOPPED = "T"  # by SIGSTOP or by Ctrl-Z at its terminal; "t": stopped by a debugger
ENDED = "XZ"


def process_state(pid: int) -> str:
    """The letter of the process's state in /proc; "?" if it can't be read."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "X" if Path("/proc/self").exists() else "?"
    except PermissionError:
        return "?"
