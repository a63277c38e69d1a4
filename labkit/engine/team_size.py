"""Number of threads that compute a step."""

from time import monotonic

import torch

from labkit.system.processors import usable_processors

RECHECK_S = 0.5  # the system call takes 2 us, and a step can take as little as 100

_usable = 1
_asked_again_at = 0.0


def team_size() -> int:
    """Returns PyTorch's number of threads, but at most one for each processor that this process may use.

    More threads would share a processor, and every stage would wait for the slowest thread.
    """
    global _usable, _asked_again_at
    if (now := monotonic()) >= _asked_again_at:
        _usable, _asked_again_at = usable_processors(), now + RECHECK_S
    return min(torch.get_num_threads(), _usable)
