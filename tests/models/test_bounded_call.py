"""Untrusted code runs in bounded time and memory, and leaves no process running."""

import os
import time
from collections.abc import Callable

import psutil
import pytest

from labkit.models.bounded_call import BoundedCallError, bounded_call


def forever() -> str:
    while True:
        pass


def ignores_exceptions() -> str:
    while True:
        try:
            time.sleep(60)
        except BaseException:  # noqa: BLE001
            continue


def raises() -> str:
    raise RecursionError("too\ndeep")


def test_the_result_comes_back_whole() -> None:
    text = "é\n漢\udcff" * 100_000
    assert bounded_call(lambda: text.replace("\udcff", "")) == text.replace("\udcff", "")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (forever, "more than 0.3 s"),
        (ignores_exceptions, "more than 0.3 s"),
        (lambda: str(10**10**9), "more than 0.3 s"),
        (lambda: "a" * (3 << 30), "needs more than 64 MB of memory"),
        (lambda: "a" * 3_000_000, "produces more than 1 MB of text"),
        (raises, "^too deep$"),
        (lambda: str(1 // 0), "by zero"),
        (lambda: os.kill(os.getpid(), 9), "ended by signal 9"),
    ],
    ids=lambda value: getattr(value, "__name__", "") if callable(value) else value,
)
def test_what_goes_beyond_a_bound_is_ended(call: Callable[[], str], message: str) -> None:
    before = psutil.Process().children()  # from Python 3.14 on, multiprocessing keeps a process
    with pytest.raises(BoundedCallError, match=message):
        bounded_call(call, seconds=0.3 if "0.3" in message else 10, memory_bytes=64 << 20, most=1 << 20)
    assert psutil.Process().children() == before
