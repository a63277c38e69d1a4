"""Runs torchrun, and reports at the end which rank failed first and why:
`-m labkit.launcher.agent ARGUMENTS OF TORCHRUN`.

torchrun's own report is long and does not quote the rank. torchrun also waits for a stopped rank, and knows nothing
about other machines. The exit code is torchrun's: 0; 1 if a rank failed; 130 after Ctrl-C; 143 after SIGTERM.
"""

from __future__ import annotations

import logging
import os
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
from labkit.launcher.machines import Machines
from labkit.launcher.stopped import PIDS
from labkit.launcher.watch import Watch
from labkit.system.owned_folder import owned_folder

TAIL_LINES = 20
TRACEBACK = "Traceback (most recent call last):"
TORCH_PREFIX = re.compile(r"^\[rank\d+\]: ")
STDERR = "2"  # as --tee of torchrun names it
AT_ONCE_S = 1  # a rank that is killed later than this after the first failure was killed because of it


def main(arguments: Sequence[str]) -> int:
    """Runs torchrun to its end and returns the exit code."""
    loopback.register()
    with owned_folder(FOLDERS) as folder:
        logs, pids = folder / "logs", folder / "pids"
        pids.mkdir()
        os.environ[PIDS] = str(pids)
        options = torchrun.parse_args(["--log-dir", str(logs), "--tee", STDERR, *arguments])
        machines = _machines(options)
        logging.disable(logging.ERROR)  # failures are reported below instead of in torchrun's log
        try:
            with Watch(pids, machines) as watch:
                torchrun.run(options)
        except ChildFailedError as failed:
            _say(_cause(watch.cause, blamed(logs, failed.failures), machines))
            return 1
        except SignalException as ended:
            if machines is not None:
                machines.tell(f"error: the run was interrupted by {ended.sigval.name} on {machines.name}")
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


def _machines(options: Any) -> Machines | None:
    """The machines of the run; None if there is only this one."""
    count = int(options.nnodes.rpartition(":")[2])
    if count == 1:
        return None
    timeouts = dict(pair.split("=") for pair in options.rdzv_conf.split(",") if pair)
    if options.rdzv_backend == "static":
        host, port, join_s = options.master_addr, options.master_port, timeouts["timeout"]
        has_store = int(options.node_rank) == 0
    else:
        host, _, port = options.rdzv_endpoint.rpartition(":")
        has_store, join_s = bool(int(timeouts["is_host"])), timeouts["join_timeout"]
    return Machines(host.strip("[]"), int(port), count, has_store=has_store, join_s=float(join_s))


def _cause(cause: str | None, failure: RankFailure, machines: Machines | None) -> str:
    """The report of what ended the run, on any of the machines. cause: why this machine ended it, if it did."""
    if machines is None:
        return cause or _report(failure)
    report = cause or _report(failure, f" on {machines.name}")
    if cause is None and failure.lost_connection:
        return machines.hear() or report
    return machines.tell(report)


def blamed(logs: Path, failed: Mapping[int, Any]) -> RankFailure:
    """The failure on this machine that caused the others, from torchrun's record and from the ranks' stderr.

    failed: the `ProcessFailure` of each rank, the one that torchrun saw first in front. Ranks that torchrun ended are
    not to blame, unless they had raised an error before.
    """
    seen, first = next(iter(failed.items()))
    before = seen - first.local_rank  # ranks of other machines
    codes = {rank: end.exitcode for rank, end in failed.items() if end is first or not _ended_by_torchrun(end, first)}
    logs_by_rank = {before + int(log.parent.name): log for log in logs.glob("*/attempt_*/*/stderr.log")}
    failures = []
    for rank, log in logs_by_rank.items():
        text = log.read_text(errors="replace")
        if rank in codes or TRACEBACK in text:
            failures.append(RankFailure(rank, codes.get(rank), _tail(text), log.stat().st_mtime))
    return to_blame(failures)


def _ended_by_torchrun(later: Any, first: Any) -> bool:
    """Whether torchrun ended a rank because of the first failure: with SIGTERM, or with SIGKILL if the rank stayed.
    torchrun lists such ranks as failed, too.
    """
    killed = later.exitcode == -signal.SIGKILL and later.timestamp > first.timestamp + AT_ONCE_S
    return bool(killed or later.exitcode == -signal.SIGTERM)


def _tail(text: str) -> str:
    """The last traceback, or the last lines."""
    lines = [TORCH_PREFIX.sub("", line) for line in text[max(0, text.rfind(TRACEBACK)) :].rstrip().splitlines()]
    return "\n".join(lines[-TAIL_LINES:])


def _report(failure: RankFailure, where: str = "") -> str:
    end = "" if failure.exit_code is None else f" ({how_it_ended(failure.exit_code)})"
    output = "".join(f"\n    {line}" for line in failure.said.splitlines()) or " it wrote nothing to stderr"
    remark = ""
    if failure.lost_connection:
        remark = "\nIt lost its connection to another rank: look for the cause on the other machines"
    return f"error: rank {failure.rank} failed{where}{end}:{output}{remark}"


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")


if __name__ == "__main__":
    code = main(sys.argv[1:])
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)  # a thread that waits for a lost store cannot be ended otherwise
