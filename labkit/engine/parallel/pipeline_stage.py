"""One stage of a pipeline: a rank with some of a model's layers, and its connection to the other stages.

The ranks are numbered stage by stage: pp_rank * tp_size + tp_rank. Each rank has a ring with the ranks of the other
stages that have the same tp_rank. Messages go from stage to stage, and from the last stage back to the first.
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
    """Content of a message."""

    ROWS = 1  # output rows of a stage's layers
    TOKENS = 2  # tokens that begin a step
    RESULT = 3  # of a step
    END = 4  # complete texts
    DROP = 5  # rows of a micro-batch that have ended
    REGROUP = 6  # micro-batches whose rows are divided anew, with their new numbers of rows
    COUNTS = 7  # times of tokens in several micro-batches and in one


@dataclass(frozen=True)
class PipelineSpan:
    """One activity of a stage. Times are perf_counter_ns, which is one clock for all processes of a machine."""

    kind: str  # "compute", "wait" for a message, "send" one, or "sample"
    phase: Phase
    pp_rank: int
    micro_batch: int
    step: int  # of the micro-batch, 0 for its prompt
    begin_ns: int
    end_ns: int


class PipelineStage:
    """This rank's stage: `number` of `count`, with the layers `layers[number]`.

    ring: connection to the other stages.
    tp: with the rank group of this stage.
    options: of `pipeline_parallel`; between two calls all ranks may change its schedule and micro-batches.
    counts: measurements that choose the number of micro-batches.
    device: of this rank.
    """

    def __init__(
        self,
        number: int,
        layers: tuple[range, ...],
        ring: Ring,
        tp: TensorParallel,
        options: PipelineParallel,
        device: torch.device,
    ) -> None:
        self.number, self.layers, self.ring, self.tp, self.options = number, layers, ring, tp, options
        self.counts, self.device = MicroBatchCounts(), device
        self._spans: deque[PipelineSpan] = deque(maxlen=MOST_SPANS)

    @property
    def count(self) -> int:
        return len(self.layers)

    @property
    def is_first(self) -> bool:
        return self.number == 0

    @property
    def is_last(self) -> bool:
        return self.number == self.count - 1

    def send(self, kind: MessageKind, micro_batch: int, step: int, payload: Tensor, phase: Phase) -> None:
        """Sends a message to the next stage; the last stage sends to the first. payload: [rows, width]."""
        begin = perf_counter_ns()
        with stage(phase, Stage.SEND):
            self.ring.send(Message(kind, micro_batch, step, payload.contiguous(), begin))
        self.note("send", phase, micro_batch, step, begin)

    def receive(self, expected: Phase) -> tuple[Message, Phase]:
        """Returns the next message of the previous stage, and its phase. The wait is a span; profilers see it under the
        phase `expected`.
        """
        begin = perf_counter_ns()
        with stage(expected, Stage.RECV):
            message = self.ring.receive()
        phase = Phase.DECODE if message.step else Phase.PREFILL
        self.note("wait", phase, message.micro_batch, message.step, begin)
        return message, phase

    @contextmanager
    def computing(self, phase: Phase, micro_batch: int, step: int) -> Iterator[None]:
        """Makes the block a span, which ends when the GPU has computed it. Errors of the GPU are raised here."""
        begin = perf_counter_ns()
        yield
        self.ring.await_computed()
        self.note("compute", phase, micro_batch, step, begin)

    def note(self, kind: str, phase: Phase, micro_batch: int, step: int, begin_ns: int) -> None:
        """Adds a span that ends now."""
        self._spans.append(PipelineSpan(kind, phase, self.number, micro_batch, step, begin_ns, perf_counter_ns()))

    def take_spans(self) -> list[PipelineSpan]:
        """Returns this rank's spans since the last call, at most the latest 65,536."""
        taken, self._spans = list(self._spans), deque(maxlen=MOST_SPANS)
        return taken


def join_stages(
    layers: tuple[range, ...],
    options: PipelineParallel,
    tp: TensorParallel,
    impl: str,
    device: torch.device,
    facts: Callable[[], Mapping[str, object]],
    most_bytes: int,
) -> PipelineStage:
    """Returns the stage of this process, one of several, once all ranks agree on the facts.

    layers: of each stage.
    most_bytes: size limit of a message. Two messages may be under way from a stage to the next.

    Raises ValueError unless there are stages times `tp.ranks` processes.
    """
    ensure_process_group(device.type, tp_size=tp.ranks, pp_size=options.stages)
    check_agreement(versions() | {"impl": impl} | dict(facts()))
    rank, size, world = dist.get_rank(), tp.ranks, range(options.stages * tp.ranks)
    tp_group = _group_of(rank, [list(world[begin : begin + size]) for begin in world[::size]]) if size > 1 else None
    if device.type == "cuda":  # this rank has chosen its own GPU as the current one
        device = gpu.default_device()
    ring = Ring(
        _group_of(rank, [list(world[first::size]) for first in range(size)]),
        max(LEAST_CAPACITY, 2 * most_bytes),
        transport=None if impl == "cpp" or _all_have_a_compiler(impl) else "gloo",
        gpu=device if device.type == "cuda" else None,
    )
    mine = tp.model_copy(update={"tp_group": tp_group})
    return PipelineStage(rank // size, layers, ring, mine, options, device)


def _all_have_a_compiler(impl: str) -> bool:
    """Tells whether every rank has a compiler. Mailboxes in shared memory need it; kernels for a GPU do not."""
    if impl == "reference":
        return False
    able: list[bool] = [False] * dist.get_world_size()
    dist.all_gather_object(able, build.unavailable() is None)
    return all(able)


def _group_of(rank: int, parts: list[list[int]]) -> dist.ProcessGroup:
    """Returns the process group of the part that contains this rank. All ranks make all groups."""
    groups = [dist.new_group(part) for part in parts]
    return next(group for group, part in zip(groups, parts, strict=True) if rank in part)
