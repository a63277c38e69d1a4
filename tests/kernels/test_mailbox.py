"""Mailboxes between ranks: messages of every size arrive whole and in order; a rank that has ended is named."""

import mmap
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from threading import Thread, Timer

import pytest
import torch
from torch import Tensor

from labkit.kernels import other_ranks
from labkit.kernels.mailbox import LostRankError, Message, RankFailedError, Ring, memory
from labkit.kernels.mailbox.memory import SharedMailboxes, ring_bytes
from labkit.kernels.shared_memory import SharedMemory
from labkit.system.errors import UserError

CAPACITY = 5000  # bytes; many messages are longer, and few end at the end of the memory


def ends(*pids: int, timeout_s: float = 60.0) -> list[SharedMailboxes]:
    """Mailboxes of several ranks in one process, as if the ranks had the processes `pids`."""
    shared = SharedMemory(mmap.mmap(-1, ring_bytes(len(pids), CAPACITY)), pids)
    return [SharedMailboxes(shared, rank, range(4, 4 + len(pids)), CAPACITY, timeout_s) for rank in range(len(pids))]


def payloads() -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(1)
    for rows, width in ((0, 0), (1, 1), (3, 7), (1, 1242), (1, 1243), (32, 1024), (2, 5), (100, 999)):
        yield torch.randn(rows, width, generator=generator)
        yield torch.randint(0, 1 << 40, (rows, width), generator=generator)
        yield torch.randint(0, 255, (rows, width), generator=generator, dtype=torch.uint8)


def test_messages_of_all_sizes_arrive_whole_and_in_order() -> None:
    """Through a ring of three, whose mailboxes are smaller than many messages."""
    first, second, third = ends(*[os.getpid()] * 3)
    sent = [Message(kind, kind * 2, kind * 3, payload, kind * 5) for kind, payload in enumerate(payloads())]
    received: list[Message] = []

    def send() -> None:
        for message in sent:
            first.send(message)

    def pass_on() -> None:
        for _ in sent:
            second.send(second.receive())

    threads = [Thread(target=send), Thread(target=pass_on)]
    for thread in threads:
        thread.start()
    for _ in sent:
        received.append(third.receive())
    for thread in threads:
        thread.join()
    for actual, expected in zip(received, sent, strict=True):
        assert torch.equal(actual.payload, expected.payload)
        assert actual._replace(payload=expected.payload) == expected


@pytest.fixture
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (memory, other_ranks):
        monkeypatch.setattr(module, "LOOK_S", 0.005)


@pytest.mark.usefixtures("looks_often")
def test_a_rank_that_has_ended_is_named_by_those_that_wait_for_it() -> None:
    with subprocess.Popen(["true"]) as process:
        pass
    waiting, _, _ = ends(os.getpid(), os.getpid(), process.pid)
    with pytest.raises(LostRankError, match=r"^rank 4: rank 6 has ended; all ranks of a model make the same calls"):
        waiting.receive()
    with pytest.raises(LostRankError, match=r"^rank 4: rank 6 has ended"):
        waiting.send(Message(1, 0, 0, torch.zeros(1, CAPACITY)))  # nobody receives it


@pytest.mark.usefixtures("looks_often")
def test_a_rank_that_is_stopped_is_named() -> None:
    with subprocess.Popen(["sleep", "60"]) as stopped:
        try:
            stopped.send_signal(signal.SIGSTOP)
            waiting, _ = ends(os.getpid(), stopped.pid)
            with pytest.raises(LostRankError, match=rf"rank 5 is stopped \(its process is {stopped.pid}\)"):
                waiting.receive()
        finally:
            stopped.kill()


@pytest.mark.usefixtures("looks_often")
def test_nobody_waits_for_ever() -> None:
    waiting, _ = ends(os.getpid(), os.getpid(), timeout_s=0.02)
    with pytest.raises(LostRankError, match="no message was received or sent within 0 s"):
        waiting.receive()


def test_ctrl_c_ends_a_wait() -> None:
    waiting, _ = ends(os.getpid(), os.getpid())
    Timer(0.05, signal.raise_signal, [signal.SIGINT]).start()
    with pytest.raises(KeyboardInterrupt):
        waiting.receive()


@pytest.mark.usefixtures("looks_often")
def test_a_call_that_fails_on_one_rank_fails_on_all_and_leaves_nothing_for_the_next() -> None:
    """The third rank fails while the first two send more than their mailboxes hold."""
    first, second, third = ring = ends(*[os.getpid()] * 3)
    messages: list[str] = []

    def fails(rank: SharedMailboxes, action: Callable[[], object]) -> None:
        with pytest.raises(RankFailedError) as raised:
            action()
        messages.append(str(raised.value))
        rank.fail_call(str(raised.value))

    def at_once(actions: list[Callable[[], object]]) -> None:
        threads = [Thread(target=action) for action in actions]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    for reason in ("rank 6: ValueError: once", "rank 6: ValueError: twice"):
        third.send(Message(1, 0, 0, torch.zeros(1, 7)))  # nobody receives it
        third.fail_call(reason)
        long = Message(2, 0, 0, torch.zeros(2, CAPACITY))
        at_once([partial(fails, rank, partial(rank.send, long)) for rank in (first, second)])
        assert messages == [reason] * 2
        messages.clear()
        at_once([box.begin_call for box in ring])
    for rank, (sender, receiver) in enumerate(((first, second), (second, third), (third, first))):
        sender.send(Message(3, rank, 0, torch.full((1, 3), float(rank))))
        assert receiver.receive().micro_batch == rank


@pytest.mark.parametrize(
    "payload",
    [torch.ones(3), torch.ones(2, 2, 2), torch.ones(2, 2, dtype=torch.int32), torch.ones(3, 2).T],
    ids=["one dimension", "three dimensions", "int32", "transposed"],
)
def test_a_payload_that_would_arrive_as_another_is_refused(payload: Tensor) -> None:
    sender, _ = ends(os.getpid(), os.getpid())
    with pytest.raises(UserError, match=r"payload: expected contiguous float32, int64 or uint8 \[rows, width\], got"):
        sender.send(Message(0, 0, 0, payload))


@pytest.mark.parametrize("capacity", [0, -5, 1.5])
def test_a_capacity_that_is_none_is_refused(capacity: int) -> None:
    with pytest.raises(UserError, match=f"got capacity = {capacity}, expected a number of bytes"):
        Ring(None, capacity)
