"""Random traces without meaning, for properties that hold for every trace."""

import numpy as np
import pandas as pd

from labkit.nsys.trace import Source, Trace, typed
from labkit.stages import Phase, Stage, message


def random_trace(seed: int, count: int = 400) -> Trace:
    """Nested, overlapping and touching ranges of stages and others on two threads, and work on two streams."""
    random = np.random.default_rng(seed)
    names = [message(Phase.DECODE, stage, layer) for stage in Stage for layer in (None, 1)] + ["other", "decode/step"]

    def events(longest: int) -> dict[str, object]:
        start = np.sort(random.integers(0, 200_000, count))
        length = (random.pareto(0.6, count) * 20).astype(np.int64).clip(max=longest)
        return {"start_ns": start, "end_ns": start + length, "process": np.zeros(count)}

    domain = pd.Categorical.from_codes(random.integers(0, 2, count), ["labkit", "else"])
    name = pd.Categorical.from_codes(random.integers(0, len(names), count), names)
    ranges = {**events(50_000), "tid": random.integers(1, 3, count), "domain": domain, "name": name}
    calls = {**events(300), "tid": random.integers(1, 3, count), "kind": ["api"] * count, "name": ["launch"] * count}
    work = {**events(900), "stream": random.integers(0, 2, count), "kind": ["kernel"] * count, "name": ["k"] * count}
    correlation = {"correlation": np.arange(count) + 1}
    return Trace(
        Source("nsys", "", ("random.sqlite",)),
        ranges=typed("ranges", ranges),
        calls=typed("calls", calls | correlation),
        operations=typed("operations", work | correlation),
        processes=typed("processes", {"pid": [7], "rank": [-1], "name": ["python"]}),
    )
