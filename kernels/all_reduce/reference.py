"""Sums and gathers over the ranks by torch.distributed: with NCCL on GPUs, with gloo on CPUs."""

import torch
import torch.distributed as dist
from torch import Tensor

from .exchange import Exchange


def all_reduce(x: Tensor, exchange: Exchange) -> Tensor:
    out = x.clone()
    if x.is_cuda:
        dist.all_reduce(out, group=exchange.group)
    else:
        exchange.gloo.all_reduce(out)
    return out


def all_gather(x: Tensor, exchange: Exchange) -> Tensor:
    out = [torch.empty_like(x) for _ in range(exchange.size)]
    if x.is_cuda:
        dist.all_gather(out, x, group=exchange.group)
    else:
        exchange.gloo.all_gather(out, x)
    return torch.stack(out)
