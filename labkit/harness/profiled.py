"""The program that `labkit profile` runs by default: one side generates, warm, under the ranges of its stages.

python -P -m labkit.harness.profiled MODEL SIDE [--dtype float32] [--batch 1] [--prompt 32] [--new 16] ...

With --tp N it is one of N ranks, which `labkit launch` starts. On a GPU the part to capture is between
cudaProfilerStart and cudaProfilerStop. All kernels are compiled before that part, including the kernels of steps that
run differently under a profiler.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Annotated

import numpy as np
import torch
import typer

from labkit.harness.compare.loader import load_side
from labkit.harness.compare.sides import side_row
from labkit.harness.timing import wait_for_gpu
from labkit.models.dtypes import FLOAT_DTYPES, dtype_of
from labkit.stages import unwatched
from labkit.system.command import run_command
from labkit.weights.resolve import resolve

WARM_UP = 4  # new tokens of the warm-up run, which has no ranges


def main(
    model: str,
    side: str,
    dtype: Annotated[str, typer.Option()] = "float32",
    batch: Annotated[int, typer.Option(min=1)] = 1,
    prompt: Annotated[int, typer.Option(min=1)] = 32,
    new: Annotated[int, typer.Option(min=1)] = 16,
    threads: Annotated[int, typer.Option(min=1)] = 1,
    tp: Annotated[int, typer.Option(min=1)] = 1,
    seed: Annotated[int, typer.Option()] = 0,
) -> None:
    weight_dtype = dtype_of(dtype, FLOAT_DTYPES)
    source = resolve(model, seed=seed, any_architecture=side_row(side).models == "any")
    options = {"tensor_parallel": {"tp_size": tp}} if tp > 1 else {}
    loaded = load_side(side, source, weight_dtype, threads, **options)
    tokens = np.random.default_rng(seed).integers(0, loaded.config.vocab_size, (batch, prompt))
    arguments = loaded.arguments(batch, prompt)

    def generate(new_tokens: int) -> None:
        loaded.generate(torch.from_numpy(tokens), max_new_tokens=new_tokens, **arguments)
        wait_for_gpu()

    with unwatched():
        generate(min(new, WARM_UP))
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        loaded.stage_times(lambda: generate(min(new, WARM_UP)))
    with torch.cuda.profiler.profile() if on_gpu else nullcontext():
        loaded.stage_times(lambda: generate(new))


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(main)
    run_command(app)
