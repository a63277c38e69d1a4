"""The rank in the error is the cause, not a rank that lost its connection to the cause."""

import os
import re
import signal
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
from torch.distributed import DistError
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousTimeoutError

from labkit.launcher import agent
from labkit.launcher.agent import blamed
from labkit.launcher.failure import RankFailure, how_it_ended, last_line, to_blame

LOST = "Traceback\nRuntimeError: Connection closed by peer [127.0.0.1]:36778. Check the logs"
OWN = "Traceback\nValueError: boom"
RELAYED = "RankFailedError: rank 1: ValueError: boom"


@pytest.mark.parametrize(
    "cause",
    [RankFailure(1, 1, OWN, at=5.0), RankFailure(1, -signal.SIGKILL, "", at=9.0), RankFailure(1, 3, "", at=9.0)],
    ids=["raised", "killed", "left"],
)
def test_a_lost_connection_is_not_the_cause(cause: RankFailure) -> None:
    """This holds even if the cause is noticed last."""
    assert to_blame([RankFailure(0, 1, LOST, at=1.0), cause, RankFailure(2, None, RELAYED, at=2.0)]) is cause


def test_of_two_errors_the_first_is_the_cause() -> None:
    later, first = RankFailure(0, 1, OWN, at=2.0), RankFailure(1, 1, OWN, at=1.0)
    assert to_blame([later, first]) is first


def test_a_rank_that_the_launcher_ended_was_not_killed() -> None:
    assert not RankFailure(0, -signal.SIGTERM, "", at=0.0).was_killed


TERMINATED, KILLED = -signal.SIGTERM, -signal.SIGKILL


@pytest.mark.parametrize(
    ("seen", "stderr", "cause"),
    [
        ([(3, 1, 0), (2, TERMINATED, 0)], {2: "warning", 3: OWN}, 3),
        ([(3, 1, 0), (2, KILLED, 5)], {2: "warning", 3: OWN}, 3),
        ([(3, 1, 0), (2, KILLED, 5)], {2: "warning", 3: LOST}, 3),
        ([(2, 1, 0), (3, KILLED, 0)], {2: LOST, 3: "warning"}, 3),
        ([(3, TERMINATED, 0), (2, 1, 0)], {2: LOST, 3: "warning"}, 3),
        ([(2, 1, 0), (3, TERMINATED, 0)], {2: LOST, 3: OWN}, 3),
    ],
    ids=["terminated with it", "killed with it", "of another machine", "killed", "terminated", "before it could end"],
)
def test_a_rank_that_torchrun_ended_is_not_the_cause(
    seen: list[tuple[int, int, int]], stderr: dict[int, str], cause: int, tmp_path: Path
) -> None:
    """torchrun lists ranks in the order in which it saw them end, including ranks that it ended itself.

    `seen` has rank, exit code and seconds after the first. Ranks 2 and 3 have the local ranks 0 and 1; rank 2 wrote
    its last line first.
    """
    for rank, text in stderr.items():
        log = tmp_path / "labkit" / "attempt_0" / str(rank - 2) / "stderr.log"
        log.parent.mkdir(parents=True)
        log.write_text(text.replace("Traceback", "Traceback (most recent call last):"))
        os.utime(log, (rank, rank))
    failed = {
        rank: SimpleNamespace(local_rank=rank - 2, exitcode=code, timestamp=1000 + seconds)
        for rank, code, seconds in seen
    }
    assert blamed(tmp_path, failed).rank == cause


@pytest.mark.parametrize("error", [RendezvousTimeoutError(), RendezvousConnectionError("no store"), DistError("late.")])
def test_machines_that_did_not_meet_are_told_what_to_start(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(agent.loopback, "register", lambda: None)
    monkeypatch.setattr(agent.logging, "disable", lambda level: None)
    monkeypatch.setattr(agent.torchrun, "run", mock.Mock(side_effect=error))
    assert agent.main(["script.py"]) == 1
    assert re.fullmatch(
        r"error: the machines did not meet \(.+[^.]\); start labkit launch .*\n", capsys.readouterr().err
    )


def test_ends_are_named() -> None:
    assert [how_it_ended(code) for code in (3, -11, -63)] == ["exit code 3", "killed by SIGSEGV", "killed by signal 63"]
    assert last_line("a\nb\n \n") == "b"
    assert last_line("") == ""
