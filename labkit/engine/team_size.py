"""How many threads compute a step."""

import torch

from labkit.system.processors import usable_processors


def team_size() -> int:
    """PyTorch's number of threads, at most one for each processor that this process may use.

    More would take turns on a processor, and every stage would wait for the last of them.
    """
    return min(torch.get_num_threads(), usable_processors())
