"""Times the hand-over of rows from one stage of a pipeline to the next."""

from __future__ import annotations

from collections.abc import Iterator
from time import perf_counter_ns

import torch
import torch.distributed as dist

from labkit.harness.environment import read_environment
from labkit.harness.exchange.records import HandOverMeasurement
from labkit.kernels.mailbox import Message, Ring
from labkit.launcher.spawn import launch

UNTIMED = 5  # messages at the beginning of a round


def measure_hand_over(rows: int, width: int, *, rounds: int = 15, calls: int = 100) -> HandOverMeasurement:
    """Times `calls` hand-overs of float32 [rows, width] in each of `rounds` rounds, in both directions between two
    ranks.
    """
    (transport, to_first), (_, to_second) = launch(hand_overs, rows, width, rounds, calls, pp_size=2, threads=1)
    return HandOverMeasurement(
        rows=rows,
        width=width,
        transport=transport,
        environment=read_environment(2),
        rounds_us=tuple((*first, *second) for first, second in zip(to_first, to_second, strict=True)),
    )


def hand_overs(rows: int, width: int, rounds: int, calls: int) -> tuple[str, list[list[float]]]:
    """Runs on each of the two ranks. Returns the transport, and by round the microseconds of each message that the rank
    receives: from before it is sent until its payload has arrived.
    """
    torch.set_num_threads(1)
    ring = Ring(None)
    payload = torch.randn(rows, width, generator=torch.Generator().manual_seed(3))
    if not torch.equal(ring.gather(payload)[1 - ring.rank], payload):
        raise RuntimeError("the payload changed on its way")
    taken = []
    for _ in range(rounds):
        dist.barrier()
        taken.append(list(_round(ring, payload, calls))[UNTIMED:])
    return ring.transport, taken


def _round(ring: Ring, payload: torch.Tensor, calls: int) -> Iterator[float]:
    for step in range(UNTIMED + calls):
        if ring.rank == 0:
            ring.send(Message(1, 0, step, payload, perf_counter_ns()))
        message = ring.receive()
        yield (perf_counter_ns() - message.sent_ns) / 1e3
        if ring.rank == 1:
            ring.send(Message(1, 0, step, payload, perf_counter_ns()))
