"""One rank's end of the exchange between the ranks of a model: over shared memory, or else over gloo.

The ranks of one machine write their parts into memory that all of them map, and meet there: nothing is copied, no
system call is made. Ranks that cannot map each other's memory (several machines, separate containers) get the parts of
the other ranks by torch.distributed. Either way each rank adds up the same parts in the same order.
"""

import ctypes
import mmap
from ctypes import c_double, c_uint64
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from labkit.system.errors import UserError
from labkit.system.rounding import round_up

from .. import build
from ..build import INT, LONG, POINTER, fields
from ..codes import row_stride
from ..gloo_group import GlooGroup
from ..other_ranks import LINE, TOGETHER, LostRankError, RankFailedError, SharedRanks, lines_bytes
from ..shared_memory import shared_memory

MOST_RANKS = 64
RANK_ENDED, TIMED_OUT, RANK_STOPPED, RANK_FAILED = 1, 2, 4, 5  # failures; the last: a rank left the call by an error
build.same_in_cpp({"kMostRanks": MOST_RANKS, "kRankEnded": RANK_ENDED, "kTimedOut": TIMED_OUT})
build.same_in_cpp({"kRankStopped": RANK_STOPPED, "kRankFailed": RANK_FAILED})
build.declare("labkit_all_reduce", POINTER, POINTER, LONG, POINTER)
build.declare("labkit_all_gather", POINTER, POINTER, LONG, POINTER)
ROUND_BITS = 40  # of the number of a meeting; after a failed call meetings get numbers that no rank has used before
BRING = ctypes.CFUNCTYPE(INT, INT, LONG)
Transport = Literal["shared memory", "gloo"]


@build.mirrors("Exchange")
class CExchange(ctypes.Structure):
    _fields_ = fields(
        (INT, "rank ranks"),
        (POINTER, "arrivals slots spare"),
        (LONG, "slot_bytes"),
        (POINTER, "bring"),
        (c_double, "timeout_s"),
        (c_uint64, "round"),
        (INT, "failure failed_rank failed_calls"),
    )


def slot_bytes(rows: int, width: int, vocab: int) -> int:
    """Most bytes that a rank brings to one meeting: `rows` of activations, or logits of one token."""
    return 4 * max(rows * row_stride(width), vocab + 128)


class Exchange:
    """Slots for `slot_bytes` of each rank of a process group on the CPU, and the meetings of the ranks.

    Every rank of `group` creates one at the same time. `transport`: shared memory if all ranks can map it, unless it is
    "gloo". A meeting that takes longer than `timeout_s`, or in which a rank has died or is stopped, fails on all other
    ranks. If a rank has left the call by an error, the call ends on all other ranks. `gloo` serves exchanges that do
    not use shared memory.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        slot_bytes: int,
        *,
        timeout_s: float = 600.0,
        transport: Transport | None = None,
    ) -> None:
        self.group, self.rank, self.size = group, dist.get_rank(group), dist.get_world_size(group)
        if self.size > MOST_RANKS:
            raise UserError(f"{self.size} ranks cannot share a model; use at most {MOST_RANKS}")
        self.slot_bytes = round_up(slot_bytes, LINE)
        self.error: BaseException | None = None
        self.on_gpu: dict[torch.device, Any] = {}  # a `OneShot` by GPU, or None; made on first use
        arrivals = lines_bytes(self.size)
        total = arrivals + 2 * self.size * self.slot_bytes
        shared = None if transport == "gloo" else shared_memory(group, total)
        self.transport: Transport = "gloo" if shared is None else "shared memory"
        self._memory = mmap.mmap(-1, total) if shared is None else shared.memory
        self.gloo = GlooGroup(group, timeout_s)
        self._others = None if shared is None else SharedRanks(shared, self.rank, self.gloo.names, timeout_s)
        self._slots = torch.frombuffer(self._memory, dtype=torch.uint8)[arrivals:].view(2, self.size, self.slot_bytes)
        self._spare = torch.empty(self.slot_bytes, dtype=torch.uint8)
        self._bring = BRING(self._gather_slots)  # kept, because C holds its address
        self.c = CExchange(
            rank=self.rank,
            ranks=self.size,
            arrivals=None if shared is None else self._slots.data_ptr() - arrivals,
            slots=self._slots.data_ptr(),
            spare=self._spare.data_ptr(),
            slot_bytes=self.slot_bytes,
            bring=ctypes.cast(self._bring, POINTER),
            timeout_s=timeout_s,
        )

    def check(self) -> None:
        """Raises RuntimeError if a meeting has failed: all results since then are invalid."""
        if self.c.failure == 0:
            return
        names = self.gloo.names
        if self.error is not None:
            if isinstance(self.error, RankFailedError | LostRankError) or not isinstance(self.error, Exception):
                raise self.error  # the latter is Ctrl-C
            raise RuntimeError(
                f"rank {names[self.rank]}: the exchange with the other ranks failed: {self.error}"
            ) from self.error
        if self.c.failure == RANK_FAILED and self._others is not None:
            self._others.raise_failure()
        failed = names[self.c.failed_rank]
        reasons = {
            RANK_ENDED: f"rank {failed} has ended",
            TIMED_OUT: f"rank {failed} did not come within {self.c.timeout_s:.0f} s",
            RANK_STOPPED: f"rank {failed} is stopped",
        }
        raise LostRankError(f"rank {names[self.rank]}: {reasons[self.c.failure]}; {TOGETHER}")

    def fail_call(self, reason: str) -> None:
        """This rank leaves the call by an error, without waiting. The other ranks then leave it too."""
        self.gloo.fail_call(reason)
        if self._others is not None:
            self._others.fail_call(reason)

    def begin_call(self) -> None:
        """Returns when all ranks have left a failed call. After that they can meet again."""
        self.gloo.begin_call()
        if self._others is not None:
            self._others.begin_call(lambda: None)
        if self.c.failed_calls < self.gloo.failed_calls:
            self.c.failed_calls, self.c.failure, self.error = self.gloo.failed_calls, 0, None
            self.c.round = self.gloo.failed_calls << ROUND_BITS

    def _gather_slots(self, turn: int, count: int) -> int:
        try:
            parts = [slot[:count] for slot in self._slots[turn]]
            self.gloo.all_gather(parts, parts[self.rank].clone())
        except BaseException as error:  # noqa: BLE001 - no error can pass through C; `check` raises it
            self.error = error
            return 1
        return 0


def sum_of_ranks(x: Tensor, exchange: Exchange) -> Tensor:
    """The sum of a float32 tensor over the ranks, with the same bits on all ranks."""
    _require_plain(x, x.dtype == torch.float32)
    out = torch.empty_like(x)
    build.in_use("float32").labkit_all_reduce(ctypes.byref(exchange.c), x.data_ptr(), x.numel(), out.data_ptr())
    exchange.check()
    return out


def all_of_ranks(x: Tensor, exchange: Exchange) -> Tensor:
    """[ranks, *x.shape]: the tensor of each rank."""
    _require_plain(x, True)
    out = torch.empty(exchange.size, *x.shape, dtype=x.dtype)
    count = x.numel() * x.element_size()
    build.in_use("float32").labkit_all_gather(ctypes.byref(exchange.c), x.data_ptr(), count, out.data_ptr())
    exchange.check()
    return out


def _require_plain(x: Tensor, fits: bool) -> None:
    """Raises UserError for a tensor that the C++ code would read wrongly or beyond its end."""
    if not fits or x.device.type != "cpu" or not x.is_contiguous():
        raise UserError(
            f"got {x.dtype} {list(x.shape)} with strides {x.stride()} on {x.device}; expected contiguous numbers on "
            "the CPU, float32 for a sum"
        )
