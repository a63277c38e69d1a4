"""`labkit kernels --op all_reduce` times a sum over ranks, through shared memory and through gloo.

The sizes occur in decode steps (a row of float32 activations of 1,024 to 16,384 numbers) and in prompts. Both ways take
turns of some milliseconds within each round, in the same processes, each on a core of its own. They sum the same parts,
which stay in caches, so there are no epochs: no weights lie in a place that could differ.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from labkit.harness.compare.side_process import SideProcesses, cores_of_ranks
from labkit.harness.environment import read_environment
from labkit.harness.exchange.records import WAYS, ExchangeMeasurement
from labkit.harness.quiet import wait_until_quiet
from labkit.harness.results import save_lines
from labkit.system.bounds import check_number, check_numbers
from labkit.system.errors import UserError
from labkit.system.home import expanded
from labkit.system.output_folder import check_output_folder
from labkit.system.progress import Progress, unheard

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
    wait_quiet_s: float | None = None,
    output: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> tuple[ExchangeMeasurement, ...]:
    """Times `calls` sums of each size (in bytes) in each of `rounds` rounds.

    wait_quiet_s: wait at most this long until other programs leave the processors alone; None: do not wait.
    output: a folder for the caller's records, checked and made before anything is measured.

    ValueError for fewer than two ranks or rounds, and for sizes that are no whole number of float32.
    """
    for name, count in (("ranks", ranks), ("rounds", rounds)):
        check_number(name, count, least=2)
    check_numbers(calls=calls, seed=seed, wait_quiet_s=wait_quiet_s)
    if odd := [size for size in sizes if size < 4 or size % 4]:
        raise UserError(f"got sizes {odd}, expected bytes of at least one float32: multiples of 4")
    if output is not None:
        check_output_folder(output)
    if wait_quiet_s is not None:
        wait_until_quiet(wait_quiet_s, needed=ranks, progress=progress)
    follow = progress or unheard
    environment = read_environment(ranks)
    taken: dict[tuple[int, str], list[tuple[float, ...]]] = {(size, way): [] for size in sizes for way in WAYS}
    with SideProcesses("all_reduce", 1, ranks) as side:
        follow(0, rounds + 1, f"starting {ranks} ranks")
        transport = side.ask("open_exchange", sizes=list(sizes))[0]["transport"]
        for index in range(rounds):
            follow(index + 1, rounds + 1, f"round {index + 1} of {rounds}")
            replies = side.ask("time_exchange", calls=calls, seed=seed + index)
            for blocks in zip(*(reply["blocks"] for reply in replies), strict=True):
                slowest = np.max([block["us"] for block in blocks], axis=0)
                taken[blocks[0]["bytes"], blocks[0]["impl"]].append(tuple(slowest.round(3).tolist()))
    follow(rounds + 1, rounds + 1, "done")
    return tuple(
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


def save_exchange(rows: Sequence[ExchangeMeasurement], folder: str | os.PathLike[str]) -> Path:
    """Writes the sums of a measurement as a file of JSON lines in `folder`; returns its path. SaveError as `save`."""
    stem = f"{rows[0].created:%Y%m%dT%H%M%S%f}-all_reduce-r{rows[0].ranks}"
    return save_lines(expanded(folder) / f"{stem}.jsonl", rows)
