"""Exercise: which optimisation of a profiled step pays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from labkit.notebooks.workshop.answers import judged_answers
from labkit.notebooks.workshop.exercises import Attempt, Report

MATRICES = ("qkv", "attn_out", "mlp", "mlp_out", "lm_head")
INT8, FUSED, LEFT = 0.55, 1 / 3, 0.1  # time that stays of what an optimisation touches
SAVING = "this is what is saved, and not the step"
APART = 1.03  # least ratio of the best two results, and of a mistake's number to the right one


def parameters(rng: np.random.Generator) -> dict[str, Any]:
    """A profile in which one optimisation is clearly the best, and no mistake gives nearly the right number."""
    while True:
        drawn = {name: float(f"{rng.uniform(0.3, 4):.2f}") for name in MATRICES}
        drawn |= {name: float(f"{rng.uniform(0.3, 8):.2f}") for name in ("attention", "outside")}
        drawn["residual"] = float(f"{rng.uniform(0.05, 0.5):.2f}")
        first, second, _ = sorted(results(drawn).values())
        numbers = [(right, wrong) for right, mistakes in expected(drawn).values() for wrong in mistakes]
        if second / first > APART and all(abs(np.log(wrong / right)) > np.log(APART) for right, wrong in numbers):
            return drawn


def results(of: Mapping[str, float]) -> dict[str, float]:
    """The step after each optimisation, in milliseconds."""
    step, weights = sum(of.values()), sum(of[name] for name in MATRICES)
    return {
        "int8": step - (1 - INT8) * weights,
        "attention": step - (1 - FUSED) * of["attention"],
        "one_call": step - (1 - LEFT) * of["outside"],
    }


def expected(of: Mapping[str, float]) -> dict[str, tuple[float, dict[float, str]]]:
    """The right numbers, each with the numbers that common mistakes give."""
    step, weights, after = sum(of.values()), sum(of[name] for name in MATRICES), results(of)
    return {
        "int8_ms": (
            after["int8"],
            {
                INT8 * step: "only the stages that read weights become faster",
                step - (1 - INT8) * (weights + of["attention"]): "attention reads keys and values, which stay",
                step - INT8 * weights: "0.55 of the time stays, and 0.45 is saved",
                (1 - INT8) * weights: SAVING,
            },
        ),
        "attention_ms": (
            after["attention"],
            {
                step / 3: "only the attention stage becomes faster",
                step - of["attention"] / 3: "a third stays, and two thirds are saved",
                (1 - FUSED) * of["attention"]: SAVING,
            },
        ),
        "one_call_ms": (
            after["one_call"],
            {
                step - of["outside"]: "a tenth of it stays",
                step - of["outside"] / 10: "a tenth stays, and nine tenths are saved",
                (1 - LEFT) * of["outside"]: SAVING,
            },
        ),
        "most_gain": (
            step / (step - of["attention"]),
            {
                of["attention"] / step: "this is the stage's share of the step",
                3.0: "this is the gain of the stage alone",
                (step - of["attention"]) / step: "this is new / old",
            },
        ),
    }


def check(work: Attempt) -> Report:
    """Whether the numbers are right, and the choice."""
    after = results(work.parameters)
    best = min(after, key=lambda name: after[name])
    return judged_answers(work.folder / "answers.toml", expected(work.parameters), {"best": (best, tuple(after))})
