"""How much of a model is packed: a bar on stderr, for models that are large enough to wait for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from labkit.system.progress import progress_bar
from labkit.system.terminal import terminal
from labkit.weights.capacity import layer_bytes, outside_bytes
from labkit.weights.spec import WeightSpec

WORTH_A_BAR = 512 << 20  # bytes
MEGABYTE = 10**6

PackedLayers = Callable[[int], None]  # called with the number of packed layers, 0 after the weights outside of them


@contextmanager
def packing_shown(spec: WeightSpec) -> Iterator[PackedLayers | None]:
    """Yields what shows the progress in megabytes, on the first rank; None for a small model."""
    outside, layer, layers = outside_bytes(spec), layer_bytes(spec), len(spec.part.layers)
    total = outside + layers * layer
    if spec.part.rank or total < WORTH_A_BAR:
        yield None
        return
    with progress_bar(terminal(stderr=True)) as follow:
        follow(0, total // MEGABYTE, "MB packed")
        yield lambda packed: follow((outside + packed * layer) // MEGABYTE, total // MEGABYTE, "MB packed")
