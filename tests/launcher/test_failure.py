"""The rank that is named is the cause, not one that lost its connection to it."""

import signal

import pytest

from labkit.launcher.failure import Failure, how_it_ended, last_line, to_blame

LOST = "Traceback\nRuntimeError: Connection closed by peer [127.0.0.1]:36778. Check the logs"
OWN = "Traceback\nValueError: boom"


@pytest.mark.parametrize(
    "cause",
    [Failure(1, 1, OWN, at=5.0), Failure(1, -signal.SIGKILL, "", at=9.0), Failure(1, 3, "", at=9.0)],
    ids=["raised", "killed", "left"],
)
def test_a_lost_connection_is_not_the_cause(cause: Failure) -> None:
    """However late the cause is noticed."""
    assert to_blame([Failure(0, 1, LOST, at=1.0), cause, Failure(2, None, LOST, at=2.0)]) is cause


def test_of_two_errors_the_first_is_the_cause() -> None:
    later, first = Failure(0, 1, OWN, at=2.0), Failure(1, 1, OWN, at=1.0)
    assert to_blame([later, first]) is first


def test_a_rank_that_the_launcher_ended_was_not_killed() -> None:
    assert not Failure(0, -signal.SIGTERM, "", at=0.0).was_killed


def test_ends_are_named() -> None:
    assert [how_it_ended(code) for code in (3, -11, -63)] == ["exit code 3", "killed by SIGSEGV", "killed by signal 63"]
    assert last_line("a\nb\n \n") == "b"
    assert last_line("") == ""
