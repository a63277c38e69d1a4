"""Impossible captures are refused before anything is started or searched for."""

import threading
from pathlib import Path

import pytest

from labkit.nsys.capture import profile as capture
from labkit.nsys.capture.command import Window
from labkit.nsys.capture.profile import profile
from labkit.system.asked_from import from_command_line


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"source": "perf"}, "expected one of auto, nsys, torch"),
        ({"ranks": "all"}, "expected one of one, per-rank"),
        ({"window": Window("x@y", 0)}, "expected 1"),
        ({"ranks": "per-rank"}, "expected a command that starts with torchrun"),
    ],
)
def test_a_request_that_makes_no_sense_is_refused(options: dict[str, object], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        profile(["python", "x.py"], output=tmp_path, **options)  # type: ignore[arg-type]


def test_a_program_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"'gpt2', and there is no such program on PATH.*such as python script\.py$"):
        profile(["gpt2"], output=tmp_path)
    with from_command_line(), pytest.raises(ValueError, match=r"\(labkit's own run of a model takes --model"):
        profile(["gpt2"], output=tmp_path)


def test_a_request_is_checked_before_nsys_is_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a user with a faulty nsys would first be told to repair it."""

    def fail() -> None:
        raise AssertionError("looked for nsys")

    monkeypatch.setattr(capture, "find_nsys", fail)
    for options in ({"source": "perf"}, {"ranks": "all"}, {"ranks": "per-rank"}, {"name": "a/b"}):
        with pytest.raises(ValueError, match="expected"):
            profile(["python", "x.py"], output=tmp_path / "out", **options)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["python x.py", []])
def test_a_command_is_a_list_of_words(command: object, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected a command as a list of words"):
        profile(command, output=tmp_path)  # type: ignore[arg-type]


def test_a_function_that_cannot_be_sent_says_so(tmp_path: Path) -> None:
    lock = threading.Lock()
    with pytest.raises(ValueError, match=r"cannot be sent to the process that runs it.*inside the function"):
        profile(lambda: lock.acquire(), output=tmp_path)
