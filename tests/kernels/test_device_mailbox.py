"""Mailboxes between GPUs, with a simulated NCCL: rows arrive whole and in order, and nobody waits forever."""

import mmap
import os
import subprocess
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from random import Random
from threading import Lock
from typing import TypeVar

import pytest
import torch
from torch import Tensor

from labkit.kernels import other_ranks
from labkit.kernels.gpu import CPU
from labkit.kernels.mailbox import LostRankError, Message, RankFailedError, device, memory
from labkit.kernels.mailbox.device import DeviceMailboxes, Passed, refuse_shared_gpus
from labkit.kernels.mailbox.memory import SharedMailboxes, ring_bytes
from labkit.kernels.shared_memory import SharedMemory

CAPACITY = 1 << 16
T = TypeVar("T")


class PlayedCommunicator:
    """A simulated NCCL communicator for one direction. A send and a receive complete together: after both were
    requested, in order, and when a seeded generator says so.
    """

    def __init__(self, random: Random) -> None:
        self.random, self.lock = random, Lock()
        self.sent: deque[tuple[Tensor, list[bool]]] = deque()
        self.receives: deque[tuple[Tensor, list[bool]]] = deque()

    def ask(self, queue: deque[tuple[Tensor, list[bool]]], rows: Tensor) -> Passed:
        done: list[bool] = []
        with self.lock:
            queue.append((rows, done))

        def passed() -> bool:
            with self.lock:
                if self.sent and self.receives and self.random.random() < 0.3:
                    (rows, gone), (to, arrived) = self.sent.popleft(), self.receives.popleft()
                    to.view(-1).copy_(rows.view(-1))
                    gone.append(True)
                    arrived.append(True)
            return bool(done)

        return passed


class PlayedLinks:
    def __init__(self, outgoing: PlayedCommunicator, incoming: PlayedCommunicator) -> None:
        self.device, self._outgoing, self._incoming = CPU, outgoing, incoming

    def send(self, rows: Tensor) -> Passed:
        return self._outgoing.ask(self._outgoing.sent, rows)

    def receive(self, rows: Tensor) -> Passed:
        return self._incoming.ask(self._incoming.receives, rows)

    def computed(self) -> Passed:
        return iter((False, False, True)).__next__


def ends(*pids: int, most_bytes: int = CAPACITY, seed: int = 0) -> list[DeviceMailboxes]:
    """Mailboxes of several ranks in one process, as if the ranks had the processes `pids`."""
    communicators = [PlayedCommunicator(Random(seed + number)) for number in range(len(pids))]
    shared = SharedMemory(mmap.mmap(-1, ring_bytes(len(pids), CAPACITY)), pids)
    return [
        DeviceMailboxes(
            SharedMailboxes(shared, rank, range(4, 4 + len(pids)), CAPACITY, 60.0),
            PlayedLinks(communicators[rank], communicators[rank - 1]),
            most_bytes,
        )
        for rank in range(len(pids))
    ]


def messages(count: int, seed: int) -> Iterator[Message]:
    """Rows, tokens and words, in an order that a receiver cannot predict."""
    random, generator = Random(seed), torch.Generator().manual_seed(seed)
    for step in range(count):
        rows, width = random.choice(((0, 0), (1, 1), (3, 70), (20, 30)))
        payload = torch.randn(rows, width, generator=generator)
        if random.random() < 0.5:
            payload = payload.long() if random.random() < 0.5 else payload.to(torch.uint8)
        yield Message(random.randint(1, 7), random.randint(0, 9), step, payload, step)


def equal(actual: Message, expected: Message) -> bool:
    equal_payload = actual.payload.dtype == expected.payload.dtype and torch.equal(actual.payload, expected.payload)
    return equal_payload and actual._replace(payload=expected.payload) == expected


def on_all(boxes: list[DeviceMailboxes], act: Callable[[int], T]) -> list[T]:
    """Results of all ranks, which run at the same time."""
    with ThreadPoolExecutor(len(boxes)) as threads:
        return list(threads.map(act, range(len(boxes))))


def pass_all_round(boxes: list[DeviceMailboxes], seed: int) -> None:
    """Every rank sends before it receives; all messages arrive, and nothing remains under way."""
    sent = [list(messages(20, 10 * seed + rank)) for rank in range(len(boxes))]

    def take_part(rank: int) -> list[Message]:
        for message in sent[rank]:
            boxes[rank].send(message)
        received = [boxes[rank].receive() for _ in sent[rank - 1]]
        boxes[rank].flush()
        return received

    for rank, received in enumerate(on_all(boxes, take_part)):
        assert all(map(equal, received, sent[rank - 1]))
    assert not any(box._under_way for box in boxes)


@pytest.fixture
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (memory, other_ranks, device):
        monkeypatch.setattr(module, "LOOK_S", 0.005)


@pytest.mark.parametrize("seed", range(5))
def test_ranks_that_all_send_before_they_receive_get_everything_in_order(seed: int) -> None:
    """Around a ring of three, then back and forth between two."""
    for ranks in (3, 2):
        pass_all_round(ends(*[os.getpid()] * ranks, most_bytes=1 << 20, seed=seed), seed)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.usefixtures("looks_often")
def test_rows_of_a_call_that_failed_do_not_come_in_the_next(seed: int) -> None:
    """Two calls fail, at random points between sends and receives. The second one may fail while it drains the first
    one. Then a call succeeds.
    """
    for ranks in (3, 2):
        boxes, random = ends(*[os.getpid()] * ranks, most_bytes=1 << 20, seed=seed), Random(seed)
        sent = [random.randint(0, 12) for _ in boxes]
        received = [random.randint(0, sent[rank - 1]) for rank in range(ranks)]  # before a failure of this rank

        def fails(
            rank: int, boxes: list[DeviceMailboxes] = boxes, sent: list[int] = sent, received: list[int] = received
        ) -> str:
            box, failing_rank = boxes[rank], seed % len(boxes)
            try:
                box.begin_call()
                for message in messages(sent[rank], seed + rank):
                    box.send(message)
                for _ in range(received[rank] if rank == failing_rank else 100):
                    box.receive()
                raise ValueError("too much")
            except (ValueError, RankFailedError) as error:
                box.fail_call(str(error))
                return str(error)

        for _ in range(2):
            assert on_all(boxes, fails) == ["too much"] * ranks
        on_all(boxes, lambda rank, boxes=boxes: boxes[rank].begin_call())  # type: ignore[misc]
        pass_all_round(boxes, seed)


@pytest.mark.usefixtures("looks_often")
def test_rows_that_were_sent_but_not_announced_do_not_come_in_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next rank fails before there is room for the announcement."""
    boxes = ends(os.getpid(), os.getpid())
    boxes[1].fail_call("too much")
    with monkeypatch.context() as patched:
        patched.setattr(boxes[0]._host, "send", lambda message: boxes[0]._host.look(0.0))
        with pytest.raises(RankFailedError):
            boxes[0].send(Message(1, 0, 0, torch.ones(2, 3)))
    boxes[0].fail_call("too much")
    on_all(boxes, lambda rank: boxes[rank].begin_call())
    pass_all_round(boxes, 0)


def test_no_more_is_under_way_than_there_is_room_for() -> None:
    """A rank that sends more waits until the next rank has received some messages."""
    first, second = ends(os.getpid(), os.getpid(), most_bytes=1000)
    peak_bytes = 0
    with ThreadPoolExecutor(1) as thread:
        rows = [Message(1, 0, step, torch.full((1, 100), float(step))) for step in range(30)]
        receiving = thread.submit(lambda: [second.receive() for _ in rows])
        for message in rows:
            first.send(message)
            peak_bytes = max(peak_bytes, sum(sent.nbytes for _, sent in first._under_way))
        assert all(map(equal, receiving.result(), rows))
    assert peak_bytes <= 1000


@pytest.mark.usefixtures("looks_often")
def test_a_rank_that_ends_while_its_rows_are_awaited_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank has announced its rows before it ends."""
    with subprocess.Popen(["true"]) as process:
        pass
    waiting, lost = ends(os.getpid(), process.pid)
    monkeypatch.setattr(lost._links, "send", lambda rows: lambda: False)
    lost.send(Message(1, 0, 0, torch.ones(2, 3)))
    with pytest.raises(LostRankError, match=r"^rank 4: rank 5 has ended; all ranks of a model make the same calls"):
        waiting.receive()
    waiting.send(Message(1, 0, 0, torch.ones(2, 3)))
    with pytest.raises(LostRankError, match=r"^rank 4: rank 5 has ended"):
        waiting.flush()


def test_what_is_computed_is_waited_for() -> None:
    only, _ = ends(os.getpid(), os.getpid())
    polls: list[bool] = []

    def computed() -> Passed:
        def passed() -> bool:
            polls.append(True)
            return len(polls) == 3

        return passed

    only._links.computed = computed  # type: ignore[method-assign]
    only.await_computed()
    assert len(polls) == 3


def test_two_ranks_on_one_gpu_are_refused() -> None:
    refuse_shared_gpus([("one", "a"), ("two", "a")])
    with pytest.raises(ValueError, match="ranks 0 and 2 compute on the same GPU; each rank of a pipeline"):
        refuse_shared_gpus([("one", "a"), ("one", "b"), ("one", "a")])
