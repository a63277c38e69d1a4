"""One rank of `labkit.bench.loading`: saves its file of a checkpoint, or loads its share of one on command.

python -P -m labkit.bench.load_worker save FROM TO RANKS, under torchrun
python -P -m labkit.bench.load_worker load FROM RANKS RANK [--precision NAME] [--watch]
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from time import perf_counter, sleep
from typing import Annotated

import torch
import typer

from labkit.engine import init_inference
from labkit.engine.options import Options
from labkit.engine.team_size import team_size
from labkit.harness.environment import anonymous_memory
from labkit.harness.stored_weights import matrix_bytes
from labkit.models.policies import model_config_of
from labkit.models.shards import shard
from labkit.weights.build import build_weights
from labkit.weights.precision import precision_of
from labkit.weights.resolve import resolve
from labkit.weights.spec import WeightSpec

WATCHED_EVERY = 0.0005  # seconds
app = typer.Typer(add_completion=False)


@app.command()
def save(folder: Path, target: Path, ranks: int) -> None:
    init_inference(resolve(folder), impl="cpp", tensor_parallel={"tp_size": ranks}, save_mp_checkpoint_path=target)


@app.command()
def load(
    folder: Path,
    ranks: int,
    rank: int,
    precision: Annotated[str, typer.Option()] = "bfloat16",
    watch: Annotated[bool, typer.Option()] = False,
) -> None:
    """Prints "ready", waits for a line, loads, and prints one line of JSON.

    The line has the seconds that loading took, the bytes of the packed matrices and, with --watch, the peak of
    anonymous memory.
    """
    torch.set_num_threads(max(1, team_size() // ranks))
    part = shard(model_config_of(resolve(folder).hf_config), ranks, rank)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.readline()
    before = anonymous_memory()
    with watched(watch) as peaks:
        began = perf_counter()
        source = resolve(folder)
        options = Options(**precision_of(precision).options)
        spec = WeightSpec.of(source.hf_config, options.dtype or source.hf_config.dtype, quant=options.quant)
        with torch.inference_mode():
            weights = build_weights(replace(spec, part=part), source)
        seconds = perf_counter() - began
    line = {"seconds": seconds, "peak": max(peaks, default=before) - before, "packed": matrix_bytes(weights)}
    sys.stdout.write(json.dumps(line) + "\n")


@contextmanager
def watched(enabled: bool) -> Iterator[list[int]]:
    """Yields a list to which samples of this process's anonymous memory are added inside the context, if enabled."""
    samples: list[int] = []
    over = threading.Event()

    def watch() -> None:
        while not over.is_set():
            samples.append(anonymous_memory())
            sleep(WATCHED_EVERY)

    watcher = threading.Thread(target=watch, daemon=True)
    if enabled:
        watcher.start()
    try:
        yield samples
    finally:
        over.set()
        if enabled:
            watcher.join()


if __name__ == "__main__":
    app()
