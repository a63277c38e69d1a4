"""Studies of streaming with known figures, for tests of tables and figures made from them."""

from typing import Any

from helpers.studies.comparisons import comparison
from helpers.studies.streaming_plans import plan, point

from labkit.harness.streaming.records import MemorySample
from labkit.studies.larger_than_memory import LeftOut, StreamingStudy

BATCHES = (1, 4, 16)


def study(*, compared: bool = True, **more: Any) -> StreamingStudy:
    """Study of a model named gpt2: 2.2 GB of weights in 1.5 GB. A step takes equally long with 1 and 16 sequences."""
    points = tuple(point(batch) for batch in BATCHES)
    memory = tuple(
        MemorySample(second=index / 10, bytes=(index % 5 + 1) * 200_000_000, batch=BATCHES[index // 5])
        for index in range(5 * len(BATCHES))
    )
    fields = {
        "plan": plan(points=points), "too_large": (5000,), "memory": memory,
        "comparisons": (comparison(),) if compared else (),
        "left_out": (LeftOut(side="hf-disk", reason="not installed"),),
    }  # fmt: skip
    return StreamingStudy(**(fields | more))
