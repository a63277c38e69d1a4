"""Sums of decode size on GPUs that read each other's memory: each GPU adds up all parts by itself, in one kernel.

NCCL needs several consecutive messages for a sum, and at decode sizes messages take the time, not bytes. The memory is
PyTorch's symmetric memory, which works over NVLink and over peer access on PCIe.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from .exchange import Exchange

MOST_BYTES = 256 << 10  # above this size a ring is better: it moves fewer bytes


class OneShot:
    """A buffer on each rank's GPU that all ranks of the exchange's group can read. All ranks create it together."""

    def __init__(self, exchange: Exchange, device: torch.device) -> None:
        from torch.distributed import _symmetric_memory as symmetric

        group = exchange.group or dist.group.WORLD
        assert group is not None
        self._buffer = symmetric.empty(MOST_BYTES // 4, dtype=torch.float32, device=device)
        self._handle = symmetric.rendezvous(self._buffer, group)
        self._group_name = group.group_name

    def sum(self, x: Tensor) -> Tensor:
        mine = self._buffer[: x.numel()]
        mine.copy_(x.view(-1))
        total: Tensor = torch.ops.symm_mem.one_shot_all_reduce(mine, "sum", self._group_name)
        return total.view_as(x)


def one_shot(exchange: Exchange, device: torch.device) -> OneShot | None:
    """The buffer, or None if some rank's GPU can't read the memory of the other GPUs. All ranks get the same answer."""
    if exchange.transport != "shared memory":
        return None
    gpus = range(torch.cuda.device_count())
    reads = all(torch.cuda.can_device_access_peer(device, gpu) for gpu in gpus if gpu != device.index)
    able: list[bool] = [False] * exchange.size
    dist.all_gather_object(able, reads and len(gpus) >= exchange.size, exchange.group)
    return OneShot(exchange, device) if all(able) else None
