"""Measures the resolution of this machine: the engine takes turns with itself, in epochs, for a minute."""

from __future__ import annotations

from datetime import date

import numpy as np

from labkit.harness.compare.compare import comparison_case
from labkit.harness.compare.interleave import take_turns
from labkit.harness.compare.loaded_side import comparison_device
from labkit.harness.compare.plan import Schedule, SideSpec
from labkit.harness.compare.sampling import Turns
from labkit.harness.comparison import Comparison
from labkit.harness.records import Measurement
from labkit.harness.runs import Run
from labkit.statistics.kept_records import Machine
from labkit.statistics.kept_resolutions import KeptResolution
from labkit.statistics.resolution import MINUTE_S, resolution_of
from labkit.statistics.trust import busy
from labkit.system.bounds import check_numbers
from labkit.system.errors import RunError, UserError
from labkit.system.progress import Progress

SIDE = "fused"
FEWEST = 6  # epochs; their scatter is then known within a third


class ResolutionError(RunError):
    """The machine did not let its resolution be measured. The message says why, and what to do."""


def measure_resolution(
    model: str = "gpt2",
    *,
    dtype: str = "bfloat16",
    threads: int | None = None,
    prompt: int = 32,
    new: int = 128,
    budget_s: float = MINUTE_S,
    progress: Progress | None = None,
) -> KeptResolution:
    """Measures the engine against itself for `budget_s` seconds, or six epochs where they take longer. The result holds
    for models of about this size, with the same number of threads (None: the engine's own). It is not kept yet.

    An interrupt (Ctrl-C) is raised, since fewer epochs would say less about the machine than was asked for.

    UserError: an impossible name, size or dtype, or a GPU. ResolutionError: the system gave the weights no new memory,
    or other programs were busy. WorkerError: a side's process failed.
    """
    check_numbers(budget_s=budget_s)
    if (device := comparison_device()).type != "cpu":
        raise UserError(
            f"got the device {device}, expected a CPU: on a GPU weights stay in their place; hide the GPU "
            "(CUDA_VISIBLE_DEVICES=) to measure this machine's processors"
        )
    case = comparison_case(model=model, dtype=dtype, batch=1, prompt=prompt, new=new, threads=threads)
    schedule = Schedule(rounds=FEWEST, budget_s=budget_s, stages=False)
    sides = [SideSpec(SIDE, case.threads)] * 2
    turns = take_turns(sides, case, schedule, decided=_never, progress=progress)
    if turns.interrupted:
        raise KeyboardInterrupt
    return _resolution(turns.comparison(0, 1))


def _never(turns: Turns) -> bool:
    """A look that never ends the measurement. ResolutionError: other programs are busy, so it need not go on."""
    _check_quiet(turns.sides[-1])
    return False


def _check_quiet(side: Measurement) -> None:
    if busy(side.taken_cores):
        taken = float(np.median(side.taken_cores))
        raise ResolutionError(
            f"other programs used {taken:.1f} of the processors; close them, or wait until they are done, and measure "
            "again"
        )


def _resolution(comparison: Comparison) -> KeptResolution:
    side, case = comparison.candidate, comparison.case
    if comparison.why_rounds:
        raise UserError(f"got sides that cannot take turns, expected epochs: {comparison.why_rounds}")
    if not (comparison.baseline.placed_anew and side.placed_anew):
        raise ResolutionError(
            "the weights stayed in one place, so nothing shows how places differ: this needs Linux, and free memory "
            "for a second copy of the largest tensor; try a smaller model"
        )
    _check_quiet(side)
    if side.work is None:
        raise UserError(f"got {case.model}, whose weights are not counted; name a model with kernels (labkit models)")
    measured = resolution_of(comparison.logs("per_token"), _epoch_s(side.runs))
    return KeptResolution(
        machine=Machine.here(),
        threads=case.cores,
        model=case.model,
        dtype=case.dtype,
        weight_mb=side.work.weight_bytes / 1e6,
        scatter=measured.scatter,
        bias=measured.bias,
        epoch_s=measured.epoch_s,
        epochs=comparison.rounds,
        measured=date.today(),
    )


def _epoch_s(runs: tuple[Run, ...]) -> float:
    """Seconds from the beginning of an epoch to the beginning of the next, as a mean."""
    begins = [run.turns[0].at_s for run in runs]
    return (begins[-1] - begins[0]) / (len(begins) - 1)
