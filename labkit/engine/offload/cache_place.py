"""Where the keys and values of an engine lie that are not where they are computed with."""

from __future__ import annotations

from platform import node

import torch

from labkit.engine.memory.heads_on_host import HostMemory
from labkit.engine.memory.place import CachePlace
from labkit.engine.offload.cache_folder import cache_folder
from labkit.engine.offload.options import KvOffload
from labkit.engine.parallel.ranks import Ranks
from labkit.kernels.slot_stream.queues import Queues
from labkit.weights.checkpoint.save import Gather


def cache_place(
    wanted: KvOffload, dtype: torch.dtype, device: torch.device, ranks: Ranks | None, gather: Gather, queues: Queues
) -> CachePlace:
    """The place that is asked for, here and on the other ranks. dtype: of the weights. device: that computes, with its
    queues. Raises UserError for a folder that can't be used.
    """
    agree = (lambda failed: ranks.agree("the caches", flag=failed)) if ranks else None
    if wanted.device == "disk":
        return cache_folder(wanted, dtype, agree)
    return HostMemory(wanted.slots, agree, device, queues, ranks_here=gather(node()).count(node()))
