"""What announcing steps and stages costs a decode step while nobody listens.

python -P -m labkit.bench.ranges [--model gpt2] [--rounds 60]

One engine generates in turn as it is and within `stages.unwatched`, where nothing is announced and nobody is asked
whether they listen. A round holds one run of each.
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
    """The time of an ordinary run over that of one without announcements, and the milliseconds of a token."""
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
    announced: list[float] = []
    without: list[float] = []
    for _, order in zip(range(rounds), random_orders(2), strict=False):
        for side in order:
            (announced if side else without).append(run() if side else silent())
    return ratio(announced, without), float(np.median(announced))


def main(
    model: Annotated[str, typer.Option()] = RANGES_MODEL, rounds: Annotated[int, typer.Option(min=2)] = 60
) -> None:
    found, token_ms = cost_of_ranges(model, rounds)
    what = f"ranges nobody listens to, a {model} token of {token_ms:.2f} ms with them over one without"
    print_checks([at_most(what, found, 1 + RANGES_COST, FINE)])


if __name__ == "__main__":
    run_command(lambda: typer.run(main))
