"""`labkit kernels --op all_reduce`: what a sum over ranks takes, through shared memory and through gloo.

Sizes are those of a decode step (a row of float32 activations of 1,024 to 16,384 numbers) and of prompts. Both ways
run in the same processes, each on a core of its own, in turns within each round.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from labkit.harness.compare.interleave import Progress
from labkit.harness.compare.sides import Side, cores_of_ranks
from labkit.harness.environment import read_environment
from labkit.harness.exchange.records import WAYS, ExchangeMeasurement
from labkit.system.errors import UserError
from labkit.system.whole_file import write_whole

KB = 1024
SIZES = (4 * KB, 8 * KB, 16 * KB, 64 * KB, 256 * KB, 1024 * KB, 2048 * KB)
ROUNDS, CALLS = 15, 100


def measure_exchange(
    ranks: int = 2,
    *,
    sizes: Sequence[int] = SIZES,
    rounds: int = ROUNDS,
    calls: int = CALLS,
    seed: int = 0,
    output: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> tuple[ExchangeMeasurement, ...]:
    """Times `calls` sums of each size (in bytes) in each of `rounds` rounds. `output`: a folder for the records.

    Raises ValueError for fewer than two ranks or rounds, and for sizes that are no whole number of float32.
    """
    for name, value, least in (("ranks", ranks, 2), ("rounds", rounds, 2), ("calls", calls, 1)):
        if value < least:
            raise UserError(f"got {name} = {value}, expected at least {least}")
    if odd := [size for size in sizes if size < 4 or size % 4]:
        raise UserError(f"got sizes {odd}, expected bytes of at least one float32: multiples of 4")
    follow = progress or (lambda done, total, label: None)
    environment = read_environment(ranks)
    taken: dict[tuple[int, str], list[tuple[float, ...]]] = {(size, way): [] for size in sizes for way in WAYS}
    with Side("all_reduce", 1, ranks) as side:
        follow(0, rounds + 1, f"starting {ranks} ranks")
        transport = side.ask("open_exchange", sizes=list(sizes))[0]["transport"]
        for index in range(rounds):
            follow(index + 1, rounds + 1, f"round {index + 1} of {rounds}")
            replies = side.ask("time_exchange", calls=calls, seed=seed + index)
            for blocks in zip(*(reply["blocks"] for reply in replies), strict=True):
                slowest = np.max([block["us"] for block in blocks], axis=0)
                taken[blocks[0]["bytes"], blocks[0]["impl"]].append(tuple(slowest.round(3).tolist()))
    follow(rounds + 1, rounds + 1, "done")
    measured = tuple(
        ExchangeMeasurement(
            ranks=ranks,
            bytes=size,
            transport=transport,
            pinned=all(cores_of_ranks(ranks, 1)),
            environment=environment,
            rounds_us={way: tuple(taken[size, way]) for way in WAYS},
        )
        for size in sizes
    )
    if output is not None:
        target = Path(output) / f"{measured[0].created:%Y%m%dT%H%M%S%f}-all_reduce-r{ranks}.jsonl"
        write_whole(target, "".join(row.model_dump_json() + "\n" for row in measured))
    return measured
