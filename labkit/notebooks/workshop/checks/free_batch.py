"""Exercise: the batch at which computing takes as long as reading."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from labkit.notebooks.workshop.answers import judged_answers
from labkit.notebooks.workshop.exercises import Attempt, Report


def parameters(rng: np.random.Generator) -> dict[str, Any]:
    """A model and a machine. The batch is below the free one for some learners, and above it for others."""
    gb_s, gflops = int(rng.choice([20, 35, 50, 80, 300])), 100 * int(rng.integers(3, 30))
    free = gflops / gb_s
    batch = max(2, round(free * rng.choice([0.4, 2.5])))
    return {"millions_of_weights": 100 * int(rng.integers(1, 80)), "gb_s": gb_s, "gflops": gflops, "batch": batch}


def expected(of: Mapping[str, Any]) -> dict[str, tuple[float, dict[float, str]]]:
    """The right numbers, each with the numbers that common mistakes give."""
    weights, gb_s, gflops, batch = of["millions_of_weights"] * 1e6, of["gb_s"], of["gflops"], of["batch"]
    read_s, compute_s = 2 * weights / gb_s / 1e9, 2 * weights / gflops / 1e9  # of one sequence
    longer, shorter = sorted((read_s, batch * compute_s), reverse=True)
    free = gflops / gb_s
    return {
        "free_bfloat16": (free, {free / 2: "a weight has two bytes", free * 2: "a product and a sum are two FLOPs"}),
        "free_int8": (
            free / 2,
            {
                free: "fewer bytes are read sooner, and computing takes as long as before",
                free * 2: "it becomes smaller",
            },
        ),
        "single": (
            1 / read_s,
            {1 / compute_s: "one sequence waits for the memory", 2 / read_s: "a weight has two bytes"},
        ),
        "at_most": (
            1 / compute_s,
            {
                1 / read_s: "that is one sequence; many share the reading",
                2 / compute_s: "a product and a sum are two FLOPs",
            },
        ),
        "step_ms": (
            longer * 1e3,
            {
                shorter * 1e3: "the longer of reading and computing decides",
                (longer + shorter) * 1e3: "they overlap, so they are not added",
                longer: "these are seconds",
            },
        ),
    }


def check(work: Attempt) -> Report:
    """Whether all numbers are right."""
    return judged_answers(work.folder / "answers.toml", expected(work.parameters))
