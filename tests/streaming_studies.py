"""Studies of streaming with known figures, for tests of what is made from them."""

from typing import Any

from comparisons import comparison
from streaming_plans import plan, point

from labkit.harness.streaming.records import MemorySample
from labkit.studies.larger_than_memory import LeftOut, StreamingStudy

BATCHES = (1, 4, 16)


def study(*, compared: bool = True, **more: Any) -> StreamingStudy:
    """Of gpt2's name and 2.2 GB of weights in 1.5 GB: a step takes as long with 16 sequences as with one."""
    points = tuple(point(batch) for batch in BATCHES)
    memory = tuple(
        MemorySample(second=place / 10, bytes=(place % 5 + 1) * 200_000_000, batch=BATCHES[place // 5])
        for place in range(5 * len(BATCHES))
    )
    found = {
        "plan": plan(points=points), "too_large": (5000,), "memory": memory,
        "comparisons": (comparison(),) if compared else (),
        "left_out": (LeftOut(side="hf-disk", reason="not installed"),),
    }  # fmt: skip
    return StreamingStudy(**(found | more))
