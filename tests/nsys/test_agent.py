"""An nsys that lost its agent before the command began is started again; other ends are not retried."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from labkit.nsys import agent
from labkit.nsys.agent import ATTEMPTS, run_with_agent
from labkit.nsys.process import Ended

LOST = Ended(1, 1.0, ("Agent launcher failed.",), interrupted=False, late=False)
THROWN = (  # nsys 2022.4, if two run at once
    "/build/QuadD/Common/ProtobufComm/Client/ClientProxy.cpp(381): Throw in function Endpoint GetLocalEndpoint() const",
    "Dynamic exception type: boost::wrapexcept<QuadDCommon::RuntimeException>",
    "std::exception::what: RuntimeException",
    "[QuadDCommon::tag_message*] = Local Endpoint is not available.",
)
VANISHED = (  # a semaphore that another capture removed
    "/build/QuadD/Common/ProcessWaiter/Src/POSIX/ProcessWaiterImpl.cpp(166): Throw in function ProcessWaiterImpl()",
    "std::exception::what: SystemException",
    '[boost::errinfo_errno_*] = 2, "No such file or directory"',
    "[boost::errinfo_api_function_*] = sem_open",
)
LAUNCHER = (  # torch's, about a rank that failed
    "E1129 21:31:16.401000 3990 lib/torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: 1) nsys",
    "Traceback (most recent call last):",
    "raise ChildFailedError(",
)
SUCCESS = Ended(0, 1.0, (), interrupted=False, late=False)


@pytest.fixture(autouse=True)
def sweeps(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    calls: list[str] = []
    monkeypatch.setattr(agent, "sweep_shared_memory", lambda **options: calls.append("swept"))
    return calls


def first(runs: Iterator[Ended], *, under_launcher: bool = False) -> Ended:
    return run_with_agent(lambda: next(runs), under_launcher=under_launcher)


@pytest.mark.parametrize("lines", [LOST.said, THROWN, VANISHED, ("Connection reset by peer",)])
def test_a_lost_agent_is_retried_a_few_times(sweeps: list[str], lines: tuple[str, ...]) -> None:
    assert first(iter([replace(LOST, said=lines), SUCCESS])) is SUCCESS
    assert sweeps == ["swept"] * 2
    assert first(iter([*[LOST] * (ATTEMPTS - 1), SUCCESS])) is SUCCESS
    assert first(iter([*[LOST] * ATTEMPTS, SUCCESS])) is LOST


@pytest.mark.parametrize("lines", [LOST.said, THROWN, VANISHED])
def test_ranks_of_which_one_lost_its_agent_are_started_again(lines: tuple[str, ...]) -> None:
    ended = replace(LOST, said=("another rank's line", *lines, "another rank's line", *LAUNCHER))
    assert first(iter([ended, SUCCESS]), under_launcher=True) is SUCCESS
    assert first(iter([ended])) is ended


@pytest.mark.parametrize("lines", [("my own End of file",), (*LAUNCHER, "End of file"), LAUNCHER])
def test_ranks_that_fail_by_themselves_are_not_started_again(lines: tuple[str, ...]) -> None:
    ended = replace(LOST, said=lines)
    assert first(iter([ended]), under_launcher=True) is ended


@pytest.mark.parametrize(
    "ended",
    [
        SUCCESS,
        Ended(1, 1.0, LOST.said, interrupted=True, late=False),
        Ended(1, 1.0, LOST.said, interrupted=False, late=True),
        Ended(1, 1.0, ("my own trouble", *LOST.said), interrupted=False, late=False),
    ],
)
def test_no_other_end_is_retried(ended: Ended) -> None:
    assert first(iter([ended])) is ended
