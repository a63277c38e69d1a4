"""Comparisons with known figures, for tests of tables and figures that are made from comparisons."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import numpy as np

from labkit.engine import StageTime
from labkit.harness.comparison import Comparison
from labkit.harness.environment import Environment
from labkit.harness.records import Measurement
from labkit.harness.roofline import Work
from labkit.harness.runs import Case, Run, TokenTurn
from labkit.stages import Phase, Stage

BANDWIDTH_GB_S = 60.0
STEP_MS = {"hf-eager": 36.0, "fused": 12.0}
STAGE_SHARES = {
    Stage.EMBED: 0.01, Stage.QKV: 0.14, Stage.ATTENTION: 0.12, Stage.ATTN_OUT: 0.05, Stage.MLP: 0.2,
    Stage.MLP_OUT: 0.17, Stage.RESIDUAL: 0.02, Stage.LM_HEAD: 0.25, Stage.SAMPLE: 0.04,
}  # fmt: skip


def environment(threads: int = 2) -> Environment:
    return Environment(
        system="Linux 6 x86_64", cpu="Test CPU @ 2 GHz", cpu_flags=("avx2",), cores=2, threads=threads, memory_gb=16.0,
        governor=None, transparent_huge_pages="madvise", load_average=0.1, python="3.11.7",
        packages={"torch": "2.13.0", "transformers": "5.23.0", "labkit": "0.1.0"}, compiler="g++", commit="abc",
    )  # fmt: skip


def measurement(
    name: str,
    *,
    rounds: int = 8,
    new_tokens: int = 32,
    probed: bool = True,
    stages: bool = True,
    dtype: str = "float32",
    threads: int = 2,
) -> Measurement:
    """Measurement of one side. Steps scatter around STEP_MS[name], and rounds scatter around each other."""
    rng = np.random.default_rng(len(name))
    runs = []
    for index in range(rounds):
        mood = 1 + 0.02 * rng.standard_normal()
        steps = STEP_MS[name] * mood * (1 + 0.03 * np.abs(rng.standard_normal(new_tokens - 1)))
        ttft = 6 * STEP_MS[name] * mood
        probes = (BANDWIDTH_GB_S * 0.98, BANDWIDTH_GB_S * 1.02) if probed else None
        runs.append(
            Run(round=index, ttft_ms=ttft, decode_ms=tuple(steps), end_to_end_ms=ttft + sum(steps),
                bandwidth_gb_s=probes)
        )  # fmt: skip
    case = Case(model="gpt2", origin="random weights, seed 0, of the published gpt2 shape", dtype=dtype, batch=1,
                prompt_tokens=128, new_tokens=new_tokens, threads=threads)  # fmt: skip
    work = Work(
        decode_bytes=498e6, decode_flops=250e6, prefill_flops=32e9, weight_bytes=498_000_000, kv_bytes=9_000_000
    )
    return Measurement(
        created=datetime(2025, 1, 1, tzinfo=UTC), name=name, impl="cpp" if name == "fused" else "torch", case=case,
        environment=environment(threads), work=work, runs=tuple(runs), peak_rss_mb=560.0, load_s=1.0, first_run_s=1.0,
        stages=stage_times(STEP_MS[name], new_tokens) if stages else (), stage_run=runs[0] if stages else None,
    )  # fmt: skip


def stage_times(step_ms: float, new_tokens: int, layers: int = 2) -> tuple[StageTime, ...]:
    """Stage times that divide a decode step by STAGE_SHARES, layer by layer; prefill takes six times as long."""
    times = []
    for phase, calls, total in ((Phase.PREFILL, 1, 6 * step_ms), (Phase.DECODE, new_tokens - 1, step_ms)):
        for stage, share in STAGE_SHARES.items():
            layer_numbers = [None] if stage in (Stage.EMBED, Stage.LM_HEAD, Stage.SAMPLE) else list(range(layers))
            for layer in layer_numbers:
                times.append(StageTime(phase, stage, layer, calls, share * total * calls / len(layer_numbers)))
    return tuple(times)


def comparison(**options: Any) -> Comparison:
    """Comparison of two sides; `options` are the options of `measurement`."""
    baseline, candidate = (measurement(name, **options) for name in STEP_MS)
    return Comparison(baseline=baseline, candidate=candidate, tokens_equal=True, first_difference=None)


Pairs = Sequence[tuple[float, float | None]]  # milliseconds per token and the probed rate of each turn of an epoch


def in_epochs(side: Measurement, epochs: Sequence[Pairs], *, place: int = 0) -> Measurement:
    """The same side with these epochs, whose turns have the place `place` in the order of their pair."""
    runs = []
    for index, pairs in enumerate(epochs):
        turns = [
            TokenTurn(pair=pair, place=place, at_s=2 * index + pair / 10 + place / 20, first_step_ms=1.5 * step_ms,
                      step_ms=step_ms, bandwidth_gb_s=rate)
            for pair, (step_ms, rate) in enumerate(pairs)
        ]  # fmt: skip
        steps = [turn.step_ms for turn in turns for _ in range(3)]
        new = side.case.new_tokens
        first = 6 * steps[0]
        fields: dict[str, Any] = {"first_ms": first, "prompts_ms": [first], "decode_ms": steps, "new_tokens": new}
        runs.append(Run.of_epoch(turns, round=index, **fields))
    return side.model_copy(update={"runs": tuple(runs), "placed_anew": True})
