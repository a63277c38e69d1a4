"""Exercise: a decode step of vanilla, of the engine and of a GPU, read from captures."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np

from labkit.notebooks.workshop.answers import drawn_apart, judged_answers
from labkit.notebooks.workshop.exercises import Attempt, Report
from labkit.nsys.analysis.attribution import attribute
from labkit.nsys.analysis.stage_table import IDLE
from labkit.nsys.analysis.steps import steps
from labkit.nsys.analysis.work import StepWork, work
from labkit.nsys.reader.reading import read
from labkit.stages import Phase, Stage
from labkit.system.carried import carried

CAPTURES = {
    "vanilla.sqlite": "gpt2-hf-eager.sqlite",
    "fused.sqlite": "gpt2-fused.sqlite",
    "gpu.sqlite": "gpt2-fused-h100.sqlite",
}
WAITS = ("the host", "the memory", "another kernel")


def parameters(rng: np.random.Generator) -> dict[str, Any]:
    """A decode step, counted from 1, and a layer, counted from 0, for which no mistake gives nearly the right
    number.
    """
    return drawn_apart(lambda: {"step": int(rng.integers(2, 24)), "layer": int(rng.integers(1, 11))}, expected)


def captures(of: Mapping[str, Any]) -> dict[str, str]:
    """The captures by the names of the learner's copies."""
    return CAPTURES


def check(work: Attempt) -> Report:
    """Whether all answers are right."""
    stages = [str(stage) for stage in Stage if stage in _stage_ms("fused.sqlite")]
    words = {"gains_most": (_gains_most(), stages), "gpu_waits_for": (WAITS[0], WAITS)}
    return judged_answers(work.folder / "answers.toml", expected(work.parameters), words)


def solved(of: Mapping[str, Any]) -> dict[str, Any]:
    """The right numbers, for the solution."""
    return {"solved": {name: right for name, (right, _) in expected(of).items()}}


def expected(of: Mapping[str, Any]) -> dict[str, tuple[float, dict[float, str]]]:
    """The right numbers, each with the numbers that common mistakes give."""
    vanilla_ms, fused_ms = (_step_ms(name, of["step"]) for name in ("vanilla.sqlite", "fused.sqlite"))
    mlp_us, mlp_out_us = (_layer_us("fused.sqlite", of, stage) for stage in (Stage.MLP, Stage.MLP_OUT))
    outside, gpu_idle = _stage_ms("fused.sqlite")[IDLE], _stage_ms("gpu.sqlite")[IDLE]
    gpu_ms = sum(_stage_ms("gpu.sqlite").values())
    return {
        "vanilla_ms": (vanilla_ms, {fused_ms: "this is the other side", vanilla_ms * 1e3: "these are microseconds"}),
        "fused_ms": (fused_ms, {vanilla_ms: "this is the other side", fused_ms * 1e3: "these are microseconds"}),
        "mlp_us": (mlp_us, {mlp_out_us: "this is mlp_out, the second half", mlp_us / 1e3: "these are milliseconds"}),
        "outside_ms": (
            outside,
            {
                _stage_ms("vanilla.sqlite")[IDLE]: "this is the other side",
                outside * 1e3: "these are microseconds",
                _idle_ms_of_prompt(): "this is the prompt, which is one step of another kind",
            },
        ),
        "gpu_idle_percent": (
            100 * gpu_idle / gpu_ms,
            {100 - 100 * gpu_idle / gpu_ms: "in this share it worked", gpu_idle: "these are milliseconds"},
        ),
    }


@cache
def _captured(name: str) -> StepWork:
    trace = read(carried("profiles/captures") / CAPTURES[name])
    attribution = attribute(trace)
    return work(trace, steps(trace, attribution), attribution)


def _step_ms(name: str, number: int) -> float:
    frame = _captured(name).steps
    return float(frame["duration_ns"][frame["phase"] == Phase.DECODE].iloc[number - 1]) / 1e6


def _layer_us(name: str, of: Mapping[str, Any], stage: Stage) -> float:
    captured = _captured(name)
    step = captured.steps.index[captured.steps["phase"] == Phase.DECODE][of["step"] - 1]
    pieces = captured.pieces
    chosen = (pieces["step"] == step) & (pieces["layer"] == of["layer"]) & (pieces["stage"] == stage)
    return float(pieces["own_ns"][chosen].sum()) / 1e3


@cache
def _stage_ms(name: str, phase: Phase = Phase.DECODE) -> dict[str, float]:
    """Milliseconds of a mean step by stage, with the time outside of all stages."""
    captured = _captured(name)
    of_phase = captured.steps["phase"] == phase
    pieces = captured.pieces[of_phase.to_numpy()[captured.pieces["step"]]]
    by_stage = pieces.groupby("stage")["new_ns"].sum() / of_phase.sum() / 1e6
    return {str(stage): float(ms) for stage, ms in by_stage.items()} | {
        IDLE: float(captured.steps["idle_ns"][of_phase].mean()) / 1e6
    }


def _idle_ms_of_prompt() -> float:
    return _stage_ms("fused.sqlite", Phase.PREFILL)[IDLE]


def _gains_most() -> str:
    vanilla, fused = _stage_ms("vanilla.sqlite"), _stage_ms("fused.sqlite")
    return max(fused.keys() - {IDLE}, key=lambda stage: vanilla.get(stage, 0.0) - fused[stage])
