"""How fast this machine reads memory right now: the yardstick of every decode step."""

import ctypes
from functools import cache
from time import perf_counter

import torch
from torch import Tensor

from . import build
from .memory import Arena

PROBE_BYTES = 384 << 20  # several times any last-level cache a thread's share could live in


def read_bandwidth_gb_s(threads: int, seconds: float = 0.05) -> float:
    """GB/s (1e9 bytes) of reading 384 MiB once per pass with `threads` threads, the best pass within `seconds`.

    The read bandwidth of a shared machine moves within seconds: call this right beside what is to be judged by it.
    Raises BuildError where the kernels can't be compiled.
    """
    library, data = _library(), _buffer()
    deadline = perf_counter() + seconds
    best_ns = None
    while best_ns is None or perf_counter() < deadline:
        ns = library.labkit_read_ns(data.data_ptr(), data.numel(), threads)
        best_ns = ns if best_ns is None else min(best_ns, ns)
    return data.numel() / best_ns


def _library() -> ctypes.CDLL:
    return build.load("float32")


@cache
def _buffer() -> Tensor:
    return Arena.reserved(PROBE_BYTES).empty((PROBE_BYTES,), torch.uint8).fill_(1)
