"""The cost of announcing steps and stages in a decode step while no profiler listens.

python -P -m labkit.bench.ranges [--model gpt2] [--rounds 60]

One engine generates in turns with announcements and within `stages.unwatched`, which announces nothing and looks for no
profiler. A round holds one run of each.
"""

from __future__ import annotations

from time import perf_counter
from typing import Annotated

import numpy as np
import torch
import typer

from labkit.bench.bars import BarUnit, at_most
from labkit.bench.page import print_checks
from labkit.bench.targets import RANGES_COST, RANGES_MODEL
from labkit.engine import init_inference
from labkit.harness.rounds import random_orders
from labkit.stages import unwatched
from labkit.statistics import Ratio, ratio
from labkit.system.command import run_command
from labkit.weights.resolve import resolve

PROMPT, NEW = 32, 33
FINE = BarUnit("{:.4f}x", "{:g}x")


def cost_of_ranges(model: str, rounds: int) -> tuple[Ratio, float]:
    """The ratio of times, a run with announcements / a run without, and the milliseconds of a token."""
    source = resolve(model)
    engine = init_inference(source, dtype=torch.float32, replace_with_kernel_inject=True)
    rng = np.random.default_rng(0)
    prompt = torch.from_numpy(rng.integers(0, engine.model_config.vocab_size, (1, PROMPT)))

    def run() -> float:
        began = perf_counter()
        engine.generate(prompt, max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False, pad_token_id=0)
        return (perf_counter() - began) * 1e3 / NEW

    def silent() -> float:
        with unwatched():
            return run()

    run()
    announced_ms: list[float] = []
    silent_ms: list[float] = []
    for _, order in zip(range(rounds), random_orders(2), strict=False):
        for side in order:
            (announced_ms if side else silent_ms).append(run() if side else silent())
    return ratio(announced_ms, silent_ms), float(np.median(announced_ms))


def main(
    model: Annotated[str, typer.Option()] = RANGES_MODEL, rounds: Annotated[int, typer.Option(min=2)] = 60
) -> None:
    cost, token_ms = cost_of_ranges(model, rounds)
    figure = f"a {model} token of {token_ms:.2f} ms with ranges and without a profiler / a token without ranges"
    print_checks([at_most(figure, cost, 1 + RANGES_COST, FINE)])


if __name__ == "__main__":
    run_command(lambda: typer.run(main))
