"""Captures of decode steps: vanilla and fused one after the other, or the captures that labkit includes; and the ranks
of one model, with a report of each rank, all on one clock.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, cast, get_args

from labkit.harness.compare.sides import IN_PROCESS
from labkit.nsys.analysis.difference import Difference, explain
from labkit.nsys.analysis.stage_table import StageTable, stage_table
from labkit.nsys.capture.command import PROFILER_API, CaptureSource, Window
from labkit.nsys.capture.job import has_gpu
from labkit.nsys.capture.profile import profile
from labkit.nsys.capture.record import read_record
from labkit.nsys.capture.result import Capture, CaptureError, CommandFailedError
from labkit.nsys.trace import Trace
from labkit.stages import Phase
from labkit.statistics import Trust, Verdict
from labkit.studies.outcome import Outcome
from labkit.studies.settings import Model, StudySetting
from labkit.system.bounds import check_numbers
from labkit.system.carried import carried
from labkit.system.errors import UserError
from labkit.system.output_folder import RUNS
from labkit.system.partly import Show, so_far, unseen
from labkit.system.processors import usable_processors
from labkit.system.progress import Progress, unheard

SOURCES = (*get_args(CaptureSource), "bundled")
BUNDLED = carried("profiles/captures")
PROFILED = "a profiled step is slower than others: take speedups from labkit compare"
BUNDLED_SIDES = ("gpt2-hf-eager", "gpt2-fused")


@dataclass(frozen=True)
class CapturePair:
    """The captures of both sides."""

    vanilla: Capture
    fused: Capture
    remarks: tuple[str, ...] = ()  # for a reader of their figures
    of: Mapping[str, Any] = field(default_factory=dict)  # captured settings that differ from the request

    @cached_property
    def traces(self) -> tuple[Trace, Trace]:
        return self.vanilla.trace(), self.fused.trace()

    @property
    def names(self) -> tuple[str, str]:
        """The names of the sides; if both are the same side, they are numbered."""
        vanilla, fused = (str(side.record.case.get("impl", "capture")) for side in (self.vanilla, self.fused))
        return (vanilla, fused) if vanilla != fused else (f"{vanilla}, first", f"{fused}, second")

    @property
    def named_traces(self) -> dict[str, Trace]:
        return dict(zip(self.names, self.traces, strict=True))

    @property
    def decode_steps(self) -> int:
        """Number of decode steps that both sides have."""
        return min(table.step_count.get(Phase.DECODE, 0) for table in self.tables)

    @cached_property
    def tables(self) -> tuple[StageTable, StageTable]:
        """The time of each side by phase and stage."""
        vanilla, fused = (stage_table(trace, ("phase", "stage")) for trace in self.traces)
        return vanilla, fused

    @cached_property
    def difference(self) -> Difference:
        """The difference of a decode step, explained stage by stage."""
        return explain(*self.traces, names=self.names)

    @property
    def trust(self) -> Trust:
        """The grade of both captures' times, from the load of the machine during the captures."""
        doubts = [
            replace(doubt, why=f"{name}: {doubt.why}")
            for name, side in zip(self.names, (self.vanilla, self.fused), strict=True)
            for doubt in side.record.trust.doubts
        ]
        return Trust(tuple(doubts))

    @property
    def headline(self) -> str:
        """The difference, and its grade."""
        return self.trust.graded(self.difference.headline)

    @property
    def outcome(self) -> Outcome:
        """The difference, with the limits of captures in its grade."""
        decided = self.difference.verdict is not Verdict.UNDECIDED
        grade = f"{'decided' if decided else 'undecided'} over the steps of one capture of each side; {PROFILED}"
        if not self.trust.trustworthy:
            grade = f"{self.trust.sentence} {grade}"
        environment = self.vanilla.record.environment or {}
        parts = [environment.get("gpu"), environment.get("cpu", "not recorded")]
        if "threads" in environment and "cores" in environment:
            parts.append(f"{environment['threads']} of {environment['cores']} cores")
        machine = "; ".join([", ".join(part for part in parts if part), *self.remarks])
        return Outcome(self.difference.headline, grade, decided and self.trust.trustworthy, machine, self.of)


def capture_pair(
    model: Model = "smollm2-135m",
    baseline: Annotated[str, StudySetting("the vanilla side", choices=IN_PROCESS)] = "hf-eager",
    candidate: Annotated[
        str, StudySetting("the side that is compared with the baseline", choices=IN_PROCESS)
    ] = "fused",
    *,
    steps: Annotated[int, StudySetting("decode steps of each side", (1, 512))] = 16,
    source: Annotated[
        str,
        StudySetting(
            "nsys, torch (torch.profiler), bundled (captures that come with labkit), or auto", choices=SOURCES
        ),
    ] = "auto",
    threads: Annotated[int, StudySetting("CPU threads; 0: one for each core", (0, 256))] = 0,
    prompt: int = 32,
    dtype: str = "float32",
    tax: bool = True,
    output: str | os.PathLike[str] = RUNS,
    progress: Progress | None = None,
    show: Show = unseen,
) -> CapturePair:
    """Captures decode steps of both sides, each in its own process.

    The source "auto" is nsys if it is installed, else torch.profiler; if neither can capture here, the bundled
    captures with a remark.

    - prompt: random tokens of the prompt.
    - dtype: type of weights and activations.
    - tax: runs each side once more, unprofiled, to measure the cost of profiling.
    - output: folder for the captures.
    - progress: receives the progress.
    - show: receives the pair with the captures so far.

    Raises ValueError for a request that cannot be served, CommandFailedError if a side's own command fails, and
    CaptureError if "nsys" or "torch" captured nothing.
    """
    if source not in SOURCES:
        raise UserError(f"got source = {source!r}, expected one of {', '.join(SOURCES)}")
    check_numbers(steps=steps, prompt=prompt, threads=threads or None)
    if source == "bundled":
        return bundled_pair()
    threads = threads or usable_processors()
    follow = progress or unheard

    def take(number: int, side: str) -> Capture:
        case = {"impl": side, "model": model, "dtype": dtype, "prompt": prompt, "new": steps + 1, "threads": threads}
        return profile(
            own_command(model, side, dtype=dtype, prompt=prompt, new=steps + 1, threads=threads),
            name=f"{Path(model).name}-{side}{f'-{number + 1}' if baseline == candidate else ''}",
            output=output,
            case=case,
            window=own_window(),
            source=cast(CaptureSource, source),
            tax=tax,
            environment={"OMP_NUM_THREADS": str(threads)},
            progress=lambda done, total, label: follow(number * total + done, 2 * total, f"{side}: {label}"),
        )

    try:
        first = take(0, baseline)
        show(so_far(CapturePair, vanilla=first))
        return CapturePair(first, take(1, candidate))
    except CaptureError as error:
        if source != "auto" or isinstance(error, CommandFailedError):  # captures of another model would hide a failure
            raise
        bundled = bundled_pair()
        remark = f"nothing could be captured here, so these are the captures that come with labkit: {error}"
        return replace(bundled, remarks=(remark, *bundled.remarks))


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


def own_command(model: str, side: str, **options: object) -> list[str]:
    """The command that generates with one side after a warm-up, with ranges around its stages."""
    command = [sys.executable, "-u", "-P", "-m", "labkit.harness.profiled", model, side]
    return [*command, *(word for name, value in options.items() for word in (f"--{name}", str(value)))]


def own_window() -> Window:
    """The part of `own_command` to capture: on a GPU the part that it marks, after the kernels were compiled. An nsys
    that is older than the GPU's driver may see nothing of a whole run.
    """
    if not has_gpu():
        return Window()
    import torch  # imported late: without a GPU `labkit profile` does not need it

    return Window(PROFILER_API) if torch.cuda.is_available() else Window()


def bundled_pair() -> CapturePair:
    """The captures of gpt2 in profiles/captures. UserError if labkit was installed without them."""
    captures = []
    for name in BUNDLED_SIDES:
        record_file = BUNDLED / f"{name}.json"
        if not record_file.exists():
            raise UserError(
                f"{BUNDLED} has no {name}.json; expected the captures that come with labkit; install it again"
            )
        record = read_record(record_file)
        captures.append(Capture(tuple(BUNDLED / file for file in record.files), record_file, record))
    cpu = (captures[0].record.environment or {}).get("cpu", "another machine")
    vanilla, fused = (capture.record.case for capture in captures)
    remark = f"captures of {fused['model']}, taken on another day, on {cpu}: not on this machine"
    of = {"model": fused["model"], "baseline": vanilla["impl"], "candidate": fused["impl"], "steps": fused["new"] - 1}
    return CapturePair(captures[0], captures[1], (remark,), of | {"threads": fused["threads"]})
