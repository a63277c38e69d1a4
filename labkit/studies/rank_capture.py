"""A capture of the ranks of one model, with one report per rank, all on one clock."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from labkit.nsys.capture.command import CaptureSource
from labkit.nsys.capture.profile import profile
from labkit.nsys.capture.result import Capture
from labkit.studies.traces import own_command
from labkit.system.bounds import check_numbers
from labkit.system.output_folder import RUNS
from labkit.system.progress import Progress


def capture_ranks(
    model: str,
    ranks: int,
    *,
    steps: int = 8,
    prompt: int = 32,
    dtype: str = "float32",
    threads: int = 1,
    source: CaptureSource = "auto",
    output: str | os.PathLike[str] = RUNS,
    timeout_s: float | None = None,
    progress: Progress | None = None,
) -> Capture:
    """Captures decode steps of the fused engine on several ranks.

    `labkit launch` starts the ranks, each on its own processors if there are enough.

    - ranks, threads: number of ranks, and threads of each.
    - steps: decode steps.
    - prompt: tokens of the prompt.
    - source: as for `profile`.
    - output: folder for the capture.
    - timeout_s: limit for the capture.

    Raises the errors of `profile`.
    """
    check_numbers(ranks=ranks, steps=steps, prompt=prompt, threads=threads)
    case = {"impl": "fused", "model": model, "dtype": dtype, "prompt": prompt, "new": steps + 1}
    labkit = Path(sys.executable).with_name("labkit")
    return profile(
        [
            *(str(labkit), "launch", f"--tp={ranks}", f"--threads={threads}", "--no-python"),
            *own_command(model, "fused", dtype=dtype, prompt=prompt, new=steps + 1, threads=threads, tp=ranks),
        ],
        name=f"{Path(model).name}-fused-tp{ranks}",
        output=output,
        case=case | {"threads": threads, "tp": ranks},
        ranks="per-rank",
        source=source,
        tax=False,
        environment={"OMP_NUM_THREADS": str(threads)},
        timeout_s=timeout_s,
        progress=progress,
    )
