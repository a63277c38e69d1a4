"""Exercise: the limit of a decode step by hand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from labkit.notebooks.workshop.answers import drawn_apart, judged_answers
from labkit.notebooks.workshop.exercises import Attempt, Report

BYTES = 2  # of a bfloat16 number


def parameters(rng: np.random.Generator) -> dict[str, Any]:
    """A model, a batch and a machine, for which no mistake gives nearly the right number."""
    return drawn_apart(lambda: _drawn(rng), expected)


def _drawn(rng: np.random.Generator) -> dict[str, Any]:
    head_dim, kv_heads = int(rng.choice([64, 80, 128])), int(rng.choice([2, 4, 8]))
    heads = kv_heads * int(rng.choice([2, 3, 4]))
    hidden = heads * head_dim
    return {
        "layers": int(rng.integers(12, 41)),
        "hidden": hidden,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "inner": 256 * round(hidden * 2.7 / 256),
        "vocabulary": int(rng.choice([32_000, 50_304, 128_256])),
        "batch": int(rng.integers(4, 33)),
        "context": 100 * int(rng.integers(5, 41)),
        "gb_s": int(rng.choice([20, 30, 45, 60, 200, 900])),
    }


def check(work: Attempt) -> Report:
    """Whether all five numbers are right; if not, the mistake that gives the number."""
    return judged_answers(work.folder / "answers.toml", expected(work.parameters))


def expected(of: Mapping[str, Any]) -> dict[str, tuple[float, dict[float, str]]]:
    """The right numbers, each with the numbers that common mistakes give."""
    attention = 2 * of["hidden"] * of["head_dim"] * (of["heads"] + of["kv_heads"])
    mlp = 3 * of["hidden"] * of["inner"]
    layers, head = of["layers"] * (attention + mlp), of["vocabulary"] * of["hidden"]
    weights = BYTES * (layers + head)
    of_token = 2 * BYTES * of["layers"] * of["kv_heads"] * of["head_dim"]
    of_sequence = of_token * of["context"]
    cache = of["batch"] * of_sequence
    least_s = (weights + cache) / (of["gb_s"] * 1e9)
    all_heads = 4 * of["hidden"] * of["head_dim"] * of["heads"]
    return {
        "weights_mb": (
            weights / 1e6,
            {
                BYTES * layers / 1e6: "the head is missing; a step reads it to choose the token",
                BYTES * (layers + 2 * head) / 1e6: "the embedding is not read as a whole, only a row for each sequence",
                BYTES * (of["layers"] * (all_heads + mlp) + head) / 1e6: "keys and values have fewer heads",
                BYTES * (of["layers"] * (attention + mlp * 2 / 3) + head) / 1e6: "a gated MLP has three matrices",
                2 * weights / 1e6: "a bfloat16 number has two bytes",
                of["batch"] * weights / 1e6: "the weights are read once for all sequences",
            },
        ),
        "cache_mb": (
            cache / 1e6,
            {
                of_sequence / 1e6: "this is one sequence",
                cache / 2e6: "there are keys and values: two numbers for each place",
                cache * of["heads"] / of["kv_heads"] / 1e6: "keys and values have fewer heads than queries",
                of["batch"] * of_token / 1e6: "this is one token of each sequence; a step reads all of them",
                2 * cache / 1e6: "a bfloat16 number has two bytes",
            },
        ),
        "least_ms": (
            least_s * 1e3,
            {
                weights / of["gb_s"] / 1e6: "keys and values are read, too",
                least_s: "these are seconds",
                least_s * 1e6: "these are microseconds",
            },
        ),
        "tokens_per_s": (
            of["batch"] / least_s,
            {
                1 / least_s: "this is one sequence; a step makes a token for each",
                of["batch"] * of["gb_s"] * 1e9 / weights: "keys and values take time, too",
            },
        ),
        "even_batch": (
            weights / of_sequence,
            {weights / of_token: "this counts tokens; how many sequences of this length are they?"},
        ),
    }
