"""Choice of the backing store for an engine's offloaded keys and values."""

from __future__ import annotations

from platform import node

import torch

from labkit.engine.memory.heads_on_host import HostMemory
from labkit.engine.memory.stores import BackingStore
from labkit.engine.offload.cache_folder import cache_folder
from labkit.engine.offload.options import KvOffload
from labkit.engine.parallel.ranks import Ranks
from labkit.kernels.slot_stream.queues import Queues
from labkit.system.collective import Gather


def cache_place(
    option: KvOffload, dtype: torch.dtype, device: torch.device, ranks: Ranks | None, gather: Gather, queues: Queues
) -> BackingStore:
    """Returns the backing store that the option asks for. All ranks call it together. Raises UserError for an unusable
    folder.

    dtype: of the weights.
    queues: of `device`.
    """
    agree = (lambda failed: ranks.agree("the caches", flag=failed)) if ranks else None
    if option.device == "disk":
        return cache_folder(option, dtype, agree)
    return HostMemory(option.slots, agree, device, queues, ranks_here=gather(node()).count(node()))
