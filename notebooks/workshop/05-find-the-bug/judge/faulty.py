"""Makes the captures of this exercise: decode steps of gpt2, each capture with one planted fault.

    labkit profile --source nsys --no-tax -- torchrun --nproc-per-node 2 faulty.py straggling-rank
    labkit profile --source nsys --no-tax -- python -P faulty.py wrong-stage
    labkit profile --source torch --no-tax -- python -P faulty.py hidden-copy
    python -P faulty.py stalling-host CAPTURE.sqlite OUTPUT.sqlite

The last one needs no GPU: it puts a pause of the host into each decode step of a capture that a GPU made.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter_ns
from typing import Any

import torch
from torch.nn.functional import linear

import labkit
from labkit.engine.runners import layer as layers
from labkit.stages import Phase, Range, Stage, message, stage, unwatched
from labkit.weights.resolve import resolve

PROMPT, NEW, WARM_UP = 16, 9, 4
LATE_NS = 400_000  # of each MLP of the straggling rank
STALL_NS = 900_000  # of the host in each decode step
COPYING_LAYER = 7
DECODE_STEPS = """
    SELECT start, end FROM NVTX_EVENTS LEFT JOIN StringIds ON id = textId
    WHERE coalesce(text, value) = 'decode/step' ORDER BY start
"""


def generate(model: Any, new: int) -> None:
    ids = torch.arange(100, 100 + PROMPT)[None]
    model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, min_new_tokens=new, do_sample=False)


def fused(**options: Any) -> Any:
    torch.set_num_threads(1)
    return labkit.init_inference(resolve("gpt2"), dtype="float32", **options)


def captured(model: Any) -> None:
    """The steps that the profiler sees, after some that it does not see."""
    with unwatched():
        generate(model, WARM_UP)
    generate(model, NEW)


def straggling_rank() -> None:
    """Rank 1 needs longer for its part of each MLP, so rank 0 waits in the sum that follows."""

    @contextmanager
    def late(phase: Phase, name: Stage, layer: int) -> Iterator[None]:
        with stage(phase, name, layer):
            yield
            until = perf_counter_ns() + (LATE_NS if name == Stage.MLP else 0)
            while perf_counter_ns() < until:
                pass

    model = fused(tensor_parallel={"tp_size": int(os.environ["WORLD_SIZE"])})
    if os.environ["RANK"] == "1":
        layers.stage = late  # type: ignore[assignment]
    captured(model)


def wrong_stage() -> None:
    """The range of attention ends too late: with the output projection in it."""
    open_ranges: list[Range] = []

    @contextmanager
    def misplaced(phase: Phase, name: Stage, layer: int) -> Iterator[None]:
        if name == Stage.ATTENTION:
            open_ranges.append(Range(message(phase, name, layer)).open())
            yield
        elif name == Stage.ATTN_OUT:
            yield
            open_ranges.pop().close()
            with stage(phase, name, layer):
                pass
        else:
            with stage(phase, name, layer):
                yield

    model = fused()
    layers.stage = misplaced  # type: ignore[assignment]
    captured(model)


def hidden_copy() -> None:
    """One layer of vanilla transposes its first matrix of the MLP for each token, into new memory."""
    torch.set_num_threads(1)
    from labkit.harness.compare.loader import load_side

    side = load_side("hf-eager", resolve("gpt2"), torch.float32, 1)
    first = side.model.transformer.h[COPYING_LAYER].mlp.c_fc
    first.forward = lambda x: linear(x, first.weight.t().contiguous(), first.bias)
    with unwatched():
        generate(side.model, WARM_UP)
    side.stage_times(lambda: generate(side.model, NEW))


def stalling_host(source: str, output: str) -> None:
    """Before the first launch of each decode step the host does something else. Everything after it comes later."""
    pauses = [_first_launch(source, begin, end) for begin, end in _decode_steps(source)]
    shutil.copyfile(source, output)
    with sqlite3.connect(output) as database:
        for table, columns in _time_columns(database).items():
            for column in columns:
                later = " + ".join(f"({column} >= {pause})" for pause in pauses)
                database.execute(f"UPDATE {table} SET {column} = {column} + {STALL_NS} * ({later})")
    database.close()


def _decode_steps(source: str) -> list[tuple[int, int]]:
    with sqlite3.connect(source) as database:
        return list(database.execute(DECODE_STEPS))


def _first_launch(source: str, begin: int, end: int) -> int:
    with sqlite3.connect(source) as database:
        query = "SELECT min(start) FROM CUPTI_ACTIVITY_KIND_RUNTIME WHERE start >= ? AND start < ?"
        ((start,),) = database.execute(query, (begin, end))
        return int(start)


def _time_columns(database: sqlite3.Connection) -> dict[str, list[str]]:
    """The columns with times of the capture's clock, by table."""
    tables = [name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
    names = ("start", "end", "timestamp")
    columns = {
        table: [row[1] for row in database.execute(f"PRAGMA table_info({table})") if row[1] in names]
        for table in tables
    }
    return {table: times for table, times in columns.items() if times}


FAULTS: dict[str, Callable[..., None]] = {
    "straggling-rank": straggling_rank,
    "wrong-stage": wrong_stage,
    "hidden-copy": hidden_copy,
    "stalling-host": stalling_host,
}

if __name__ == "__main__":
    FAULTS[sys.argv[1]](*sys.argv[2:])
