"""Number of threads that compute a step. A side that is compared with the engine takes the same number."""

from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic

import torch

from labkit.system.processors import usable_processors

RECHECK_S = 0.5  # asking takes up to 60 us, with a quota, and a step can take as little as 100

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


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Runs torch's ops on `count` threads inside this context."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
