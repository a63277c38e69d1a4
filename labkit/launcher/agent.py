"""Runs torchrun, and says last which rank failed first and why: `-m labkit.launcher.agent ARGUMENTS OF TORCHRUN`.

torchrun's own report is long and does not quote the rank. The exit code is torchrun's: 0, or 1 where a rank failed; 130
after Ctrl-C, 143 after SIGTERM.
"""

from __future__ import annotations

import logging
import re
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.distributed import DistError
from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousError

from labkit.launcher import loopback
from labkit.launcher.command import FOLDERS
from labkit.launcher.failure import RankFailure, how_it_ended, to_blame
from labkit.system.owned_folder import owned_folder

TAIL_LINES = 20
TRACEBACK = "Traceback (most recent call last):"
TORCH_PREFIX = re.compile(r"^\[rank\d+\]: ")
STDERR = "2"
AT_ONCE_S = 1  # a rank that is killed later than this after the first failure was killed because of it


def main(arguments: Sequence[str]) -> int:
    """Run torchrun to its end; returns the exit code."""
    loopback.register()
    with owned_folder(FOLDERS) as logs:
        logging.disable(logging.ERROR)  # what torchrun would log of failures is told below
        try:
            torchrun.run(torchrun.parse_args(["--log-dir", str(logs), "--tee", STDERR, *arguments]))
        except ChildFailedError as failed:
            _say(_report(blamed(logs, failed.failures)))
            return 1
        except SignalException as ended:
            _say(f"interrupted by {ended.sigval.name}; all ranks of this machine have ended")
            return 128 + ended.sigval
        except KeyboardInterrupt:  # before torchrun listens for it
            return 128 + signal.SIGINT
        except (DistError, RendezvousError) as error:
            why = str(error).rstrip(".") or type(error).__name__
            _say(
                f"error: the machines did not meet ({why}); start labkit launch on all of them, with the same "
                "--rendezvous"
            )
            return 1
    return 0


def blamed(logs: Path, failed: Mapping[int, Any]) -> RankFailure:
    """The failure of this machine's ranks that caused the others, from torchrun's record and from what they wrote.

    failed: the `ProcessFailure` of each rank; torchrun puts the one that it saw first in front. Ranks that torchrun
    ended itself are not to blame, unless they had raised an error of their own.
    """
    seen, first = next(iter(failed.items()))
    before = seen - first.local_rank  # ranks of other machines
    codes = {rank: each.exitcode for rank, each in failed.items() if each is first or not _ended(each, first)}
    logs_by_rank = {before + int(log.parent.name): log for log in logs.glob("*/attempt_*/*/stderr.log")}
    found = []
    for rank, log in logs_by_rank.items():
        said = log.read_text(errors="replace")
        if rank in codes or TRACEBACK in said:
            found.append(RankFailure(rank, codes.get(rank), _tail(said), log.stat().st_mtime))
    return to_blame(found)


def _ended(later: Any, first: Any) -> bool:
    """Whether torchrun ended a rank because the first had failed, by SIGTERM, or by SIGKILL if it stayed; it lists
    those too.
    """
    killed = later.exitcode == -signal.SIGKILL and later.timestamp > first.timestamp + AT_ONCE_S
    return bool(killed or later.exitcode == -signal.SIGTERM)


def _tail(said: str) -> str:
    """The last traceback, or the last lines."""
    lines = [TORCH_PREFIX.sub("", line) for line in said[max(0, said.rfind(TRACEBACK)) :].rstrip().splitlines()]
    return "\n".join(lines[-TAIL_LINES:])


def _report(failure: RankFailure) -> str:
    how = "" if failure.exit_code is None else f" ({how_it_ended(failure.exit_code)})"
    said = "".join(f"\n    {line}" for line in failure.said.splitlines()) or " it said nothing on stderr"
    remark = ""
    if failure.lost_connection:
        remark = "\nIt lost its connection to another rank: look for the cause on the other machines"
    return f"error: rank {failure.rank} failed{how}:{said}{remark}"


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
