"""Exercise: captures with one planted fault each. `notebooks/workshop/05-find-the-bug/judge/faulty.py` made them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from itertools import permutations
from math import factorial
from typing import Any

import numpy as np

from labkit.notebooks.workshop.answers import judged_answers
from labkit.notebooks.workshop.exercises import Attempt, Report
from labkit.nsys.analysis.stage_table import IDLE, stage_table
from labkit.nsys.reader.reading import read
from labkit.stages import Phase, Stage
from labkit.system.carried import carried

CAPTURES = {  # by fault
    "straggling rank": "straggling-rank.sqlite",
    "stalling host": "stalling-host.sqlite",
    "wrong stage": "wrong-stage.sqlite",
    "hidden copy": "hidden-copy.json.gz",
}
FAULTS = (*CAPTURES, "slow network", "small kernels")
NAMES = "abcd"
MISPLACED, AROUND = Stage.ATTN_OUT, Stage.ATTENTION
LAYER, COPIED_MB = 7, 768 * 3072 * 4 / 1e6


def parameters(rng: np.random.Generator) -> dict[str, Any]:
    """The number of an order of the captures."""
    return {"variant": int(rng.integers(factorial(len(CAPTURES))))}


def faults(of: Mapping[str, Any]) -> dict[str, str]:
    """The fault of each capture by its name."""
    return dict(zip(NAMES, list(permutations(CAPTURES))[of["variant"]], strict=True))


def captures(of: Mapping[str, Any]) -> dict[str, str]:
    """The captures by the names of the learner's copies, which tell no fault."""
    files = {name: CAPTURES[fault] for name, fault in faults(of).items()}
    return {f"{name}.{file.partition('.')[2]}": file for name, file in files.items()}


def solved(of: Mapping[str, Any]) -> dict[str, Any]:
    """The right answers, for the solution."""
    numbers = {name: right for name, (right, _) in expected().items()}
    return {"faults": faults(of), "solved": numbers, "stage": str(MISPLACED)}


def check(work: Attempt) -> Report:
    """Whether all answers are right."""
    words = {name: (fault, FAULTS) for name, fault in faults(work.parameters).items()}
    stages = [str(stage) for stage in Stage if str(stage) in _stages("wrong stage", ("phase", "stage")).index]
    return judged_answers(work.folder / "answers.toml", expected(), {**words, "stage": (str(MISPLACED), stages)})


@cache
def expected() -> dict[str, tuple[float, dict[float, str]]]:
    """The right numbers, each with the numbers that common mistakes give."""
    by_rank = _stages("straggling rank", ("phase", "stage", "rank"))["step_ms"][str(Stage.ALL_REDUCE)]
    waiting_ms, slow_ms = float(by_rank.max()), float(by_rank.min())
    slow_rank = int(by_rank.idxmin())
    idle_ms = float(_stages("stalling host", ("phase", "stage"))["step_ms"][IDLE])
    return {
        "waiting_ms": (
            waiting_ms,
            {
                slow_ms: "this is the slow rank, which waits least",
                (waiting_ms + slow_ms) / 2: "this is the mean of both ranks",
                waiting_ms * 1e3: "these are microseconds",
            },
        ),
        "rank": (slow_rank, {1 - slow_rank: "this rank waits; the other one comes late"}),
        "idle_ms": (idle_ms, {idle_ms * 1e3: "these are microseconds"}),
        "layer": (LAYER, {LAYER + 1: "layers are counted from 0"}),
        "copied_mb": (
            COPIED_MB,
            {
                COPIED_MB / 4: "this counts numbers; a float32 number has four bytes",
                COPIED_MB * 1e6: "these are bytes",
                2 * COPIED_MB: "count each byte once, although it is read and written",
            },
        ),
    }


def _stages(fault: str, by: tuple[str, ...]) -> Any:
    """The mean decode step of a capture by stage, then by rank."""
    frame = stage_table(read(carried("profiles/captures") / CAPTURES[fault]), by).frame
    decode = frame[frame["phase"] == str(Phase.DECODE)]
    return decode.set_index([name for name in by if name != "phase"])
