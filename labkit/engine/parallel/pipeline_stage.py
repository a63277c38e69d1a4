"""One stage of a pipeline: a rank that holds some of a model's layers, and the way to the ranks with the others.

The ranks are numbered stage by stage: pp_rank * tp_size + tp_rank. Each has a ring with the ranks of the other stages
that have its number in theirs, on which messages go from stage to stage, and from the last one back to the first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from time import perf_counter_ns

import torch
import torch.distributed as dist
from torch import Tensor

from labkit.engine.options import PipelineParallel, TensorParallel
from labkit.engine.parallel.micro_batch_counts import MicroBatchCounts
from labkit.kernels import build, gpu
from labkit.kernels.mailbox import LEAST_CAPACITY, Message, Ring
from labkit.launcher.agreement import check_agreement, versions
from labkit.launcher.group import ensure_process_group
from labkit.stages import Phase, Stage, stage

MOST_SPANS = 1 << 16
NOTHING = torch.empty(0, 0)


class MessageKind(IntEnum):
    """What a message holds: rows behind a stage's layers, tokens to begin a step with, a result, the last word of a
    text, the rows of a micro-batch that have ended, the micro-batches whose rows are divided anew, with how many each
    has then, or how long tokens take in several micro-batches and in one.
    """

    ROWS = 1
    TOKENS = 2
    RESULT = 3
    END = 4
    DROP = 5
    REGROUP = 6
    COUNTS = 7


@dataclass(frozen=True)
class PipelineSpan:
    """What stage `pp_rank` did when: "compute", "wait" for a message, "send" one, or "sample"; perf_counter_ns, which
    is one clock for all processes of a machine. step: of the micro-batch, 0 for its prompt.
    """

    kind: str
    phase: Phase
    pp_rank: int
    micro_batch: int
    step: int
    begin_ns: int
    end_ns: int


class PipelineStage:
    """This rank's place: stage `number` of `count`, which holds `layers[number]`.

    tp: with the group of the stage's ranks. wanted: what was asked for; between two calls all ranks may ask for another
    schedule and other micro-batches. counts: what was measured where the micro-batches are chosen. device: that this
    rank computes on.
    """

    def __init__(
        self,
        number: int,
        layers: tuple[range, ...],
        ring: Ring,
        tp: TensorParallel,
        wanted: PipelineParallel,
        device: torch.device,
    ) -> None:
        self.number, self.layers, self.ring, self.tp, self.wanted = number, layers, ring, tp, wanted
        self.counts, self.device = MicroBatchCounts(), device
        self._spans: deque[PipelineSpan] = deque(maxlen=MOST_SPANS)

    @property
    def count(self) -> int:
        return len(self.layers)

    @property
    def name(self) -> int:
        """The number of this rank among all."""
        return dist.get_rank()

    @property
    def is_first(self) -> bool:
        return self.number == 0

    @property
    def is_last(self) -> bool:
        return self.number == self.count - 1

    def send(self, kind: MessageKind, micro_batch: int, step: int, payload: Tensor, phase: Phase) -> None:
        """To the next stage, the last one's to the first. payload: [rows, width]."""
        begin = perf_counter_ns()
        with stage(phase, Stage.SEND):
            self.ring.send(Message(kind, micro_batch, step, payload.contiguous(), begin))
        self.note("send", phase, micro_batch, step, begin)

    def receive(self, expected: Phase) -> tuple[Message, Phase]:
        """The next message of the stage before, and the phase that it belongs to, for profilers the `expected` one. The
        wait for it is a span.
        """
        begin = perf_counter_ns()
        with stage(expected, Stage.RECV):
            message = self.ring.receive()
        phase = Phase.DECODE if message.step else Phase.PREFILL
        self.note("wait", phase, message.micro_batch, message.step, begin)
        return message, phase

    @contextmanager
    def computing(self, phase: Phase, micro_batch: int, step: int) -> Iterator[None]:
        """What runs within is a span, which ends when a GPU has computed it: what goes wrong there is raised here."""
        begin = perf_counter_ns()
        yield
        self.ring.await_computed()
        self.note("compute", phase, micro_batch, step, begin)

    def note(self, kind: str, phase: Phase, micro_batch: int, step: int, begin_ns: int) -> None:
        """Adds a span that ends now."""
        self._spans.append(PipelineSpan(kind, phase, self.number, micro_batch, step, begin_ns, perf_counter_ns()))

    def take_spans(self) -> list[PipelineSpan]:
        """What this rank did since the last call, the latest 65,536 at most."""
        taken, self._spans = list(self._spans), deque(maxlen=MOST_SPANS)
        return taken


def join_stages(
    layers: tuple[range, ...],
    wanted: PipelineParallel,
    tp: TensorParallel,
    impl: str,
    device: torch.device,
    facts: Callable[[], Mapping[str, object]],
    most_bytes: int,
) -> PipelineStage | None:
    """This process among the stages, once all ranks agree on the facts; None where there is one stage.

    layers: of each stage. most_bytes: of a message, of which two may be under way from a stage to the next. Raises
    ValueError where there are not as many processes as stages times `tp.ranks`.
    """
    if wanted.stages == 1:
        return None
    ensure_process_group(device.type, tp_size=tp.ranks, pp_size=wanted.stages)
    check_agreement(versions() | {"impl": impl} | dict(facts()))
    rank, size, world = dist.get_rank(), tp.ranks, range(wanted.stages * tp.ranks)
    of_stage = _group_of(rank, [list(world[begin : begin + size]) for begin in world[::size]]) if size > 1 else None
    if device.type == "cuda":  # this rank has made a GPU of its own the current one
        device = gpu.default_device()
    ring = Ring(
        _group_of(rank, [list(world[first::size]) for first in range(size)]),
        max(LEAST_CAPACITY, 2 * most_bytes),
        transport=None if impl == "cpp" or _all_have_a_compiler(impl) else "gloo",
        gpu=device if device.type == "cuda" else None,
    )
    mine = tp.model_copy(update={"tp_group": of_stage})
    return PipelineStage(rank // size, layers, ring, mine, wanted, device)


def _all_have_a_compiler(impl: str) -> bool:
    """Whether every rank has the compiler that mailboxes in shared memory need, which kernels for a GPU do without."""
    if impl == "reference":
        return False
    able: list[bool] = [False] * dist.get_world_size()
    dist.all_gather_object(able, build.unavailable() is None)
    return all(able)


def _group_of(rank: int, parts: list[list[int]]) -> dist.ProcessGroup:
    """The process group of the part that has this rank; all ranks make all groups."""
    groups = [dist.new_group(part) for part in parts]
    return next(group for group, part in zip(groups, parts, strict=True) if rank in part)
