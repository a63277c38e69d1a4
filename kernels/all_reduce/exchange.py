"""One rank's end of the exchange between the ranks of a model: memory that they share, or gloo where they cannot.

The ranks of one machine write their parts into memory that all of them map, and meet there: nothing is copied, no
system call is made. Ranks that do not see each other's memory (several machines, containers of their own) get the
parts of the others by torch.distributed. Either way each rank adds up the same parts in the same order.
"""

import ctypes
import mmap
from ctypes import c_double, c_int32, c_int64, c_uint64, c_void_p
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from labkit.system.errors import UserError

from .. import build
from ..gloo_group import GlooGroup
from ..other_ranks import LINE, TOGETHER, LostRankError, RankFailedError, SharedRanks, lines_bytes
from ..shared_memory import shared_memory

MOST_RANKS = 64  # kMostRanks of exchange.h
ROW_PADDING = 48  # row_stride of tile.h: rows of activations are that much longer at most
RANK_FAILED = 5  # of exchange.h
ROUND_BITS = 40  # meetings are counted anew after a call that failed, from where no rank has been before
BRING = ctypes.CFUNCTYPE(c_int32, c_int32, c_int64)
Transport = Literal["shared memory", "gloo"]


@build.mirrors("Exchange")
class CExchange(ctypes.Structure):
    _fields_ = [
        ("rank", c_int32),
        ("ranks", c_int32),
        ("arrivals", c_void_p),
        ("slots", c_void_p),
        ("spare", c_void_p),
        ("slot_bytes", c_int64),
        ("bring", c_void_p),
        ("timeout_s", c_double),
        ("round", c_uint64),
        ("failure", c_int32),
        ("failed_rank", c_int32),
        ("failed_calls", c_int32),
    ]


def slot_bytes(rows: int, width: int, vocab: int) -> int:
    """What a rank brings to one meeting at most: `rows` of activations, or logits of one token."""
    return 4 * max(rows * (width + ROW_PADDING), vocab + 128)


class Exchange:
    """Slots for `slot_bytes` of each rank of a process group on the CPU, and the way to meet.

    Every rank of `group` makes one at the same time. `transport`: shared memory where all ranks can map it, unless
    "gloo" is asked for. A meeting that lasts longer than `timeout_s`, or whose rank has died or stands still, fails on
    all others; one that a rank doesn't come to because it has left the call by an error ends that call on all others.
    gloo: the way of what is not to go through shared memory.
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
        self.slot_bytes = -(-slot_bytes // LINE) * LINE
        self.error: BaseException | None = None
        self.on_gpu: dict[torch.device, Any] = {}  # what sums on that GPU, or None; made on the first use
        arrivals = lines_bytes(self.size)
        total = arrivals + 2 * self.size * self.slot_bytes
        shared = None if transport == "gloo" else shared_memory(group, total)
        self.transport: Transport = "gloo" if shared is None else "shared memory"
        self._memory = mmap.mmap(-1, total) if shared is None else shared.memory
        self.gloo = GlooGroup(group, timeout_s)
        self._others = None if shared is None else SharedRanks(shared, self.rank, self.gloo.names, timeout_s)
        self._slots = torch.frombuffer(self._memory, dtype=torch.uint8)[arrivals:].view(2, self.size, self.slot_bytes)
        self._spare = torch.empty(self.slot_bytes, dtype=torch.uint8)
        self._bring = BRING(self._gather_slots)  # kept: C holds its address
        self.c = CExchange(
            rank=self.rank,
            ranks=self.size,
            arrivals=None if shared is None else self._slots.data_ptr() - arrivals,
            slots=self._slots.data_ptr(),
            spare=self._spare.data_ptr(),
            slot_bytes=self.slot_bytes,
            bring=ctypes.cast(self._bring, c_void_p),
            timeout_s=timeout_s,
        )

    def check(self) -> None:
        """Raises RuntimeError if a meeting has failed: what was computed since is worth nothing."""
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
        other = names[self.c.failed_rank]
        why = {
            1: f"rank {other} has ended",
            2: f"rank {other} did not come within {self.c.timeout_s:.0f} s",
            4: f"rank {other} is stopped",
        }
        raise LostRankError(f"rank {names[self.rank]}: {why[self.c.failure]}; {TOGETHER}")

    def fail_call(self, reason: str) -> None:
        """This rank leaves the call by an error, so that the others do. It waits for nobody."""
        self.gloo.fail_call(reason)
        if self._others is not None:
            self._others.fail_call(reason)

    def begin_call(self) -> None:
        """Returns when all have left a call that failed. From then on they meet anew."""
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
        except BaseException as error:  # noqa: BLE001 - none can pass through C; kept for `check`
            self.error = error
            return 1
        return 0


def sum_of_ranks(x: Tensor, exchange: Exchange) -> Tensor:
    """A float32 tensor's sum over the ranks, the same bits on all of them."""
    _require_plain(x, x.dtype == torch.float32)
    out = torch.empty_like(x)
    build.in_use("float32").labkit_all_reduce(ctypes.byref(exchange.c), x.data_ptr(), x.numel(), out.data_ptr())
    exchange.check()
    return out


def all_of_ranks(x: Tensor, exchange: Exchange) -> Tensor:
    """[ranks, *x.shape]: what each rank brought."""
    _require_plain(x, True)
    out = torch.empty(exchange.size, *x.shape, dtype=x.dtype)
    count = x.numel() * x.element_size()
    build.in_use("float32").labkit_all_gather(ctypes.byref(exchange.c), x.data_ptr(), count, out.data_ptr())
    exchange.check()
    return out


def _require_plain(x: Tensor, fits: bool) -> None:
    """Raises UserError for what the C++ code would read as something else, or beyond its end."""
    if not fits or x.device.type != "cpu" or not x.is_contiguous():
        raise UserError(
            f"got {x.dtype} {list(x.shape)} with strides {x.stride()} on {x.device}; expected contiguous numbers on "
            "the CPU, float32 for a sum"
        )
