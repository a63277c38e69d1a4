"""The study of tensor parallelism: the times of one rank and of several, and how ranks wait in a step."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any

from labkit.harness.compare.compare import BUDGET_S, comparison_case
from labkit.harness.compare.interleave import take_turns
from labkit.harness.compare.plan import Schedule, SideSpec
from labkit.harness.compare.sampling import first_is_decided
from labkit.harness.comparison import Comparison
from labkit.harness.records import Measurement
from labkit.harness.results import save_or_warn
from labkit.models.config import ModelConfig
from labkit.models.policies import model_config_of
from labkit.nsys.analysis.collectives import Collectives, collectives
from labkit.nsys.capture.result import Capture, CaptureError
from labkit.nsys.trace import Trace
from labkit.studies.outcome import Outcome, Study
from labkit.studies.settings import Epochs, FloatDtype, Model, NewTokens, PromptTokens, RankThreads, StudySetting
from labkit.studies.traces import capture_ranks
from labkit.system.comma_list import listed_counts
from labkit.system.errors import UserError
from labkit.system.output_folder import RUNS
from labkit.system.partly import Show, so_far, unseen
from labkit.system.processors import usable_processors
from labkit.system.progress import Progress, unheard
from labkit.weights.resolve import resolve

STEPS = 8  # of the capture
CAPTURE_S = 600.0  # limit for a capture that hangs


@dataclass(frozen=True, repr=False)
class ParallelStudy(Study):
    """Result of `study_parallel`."""

    config: ModelConfig
    comparisons: tuple[Comparison, ...]  # of one rank with each number of ranks, in increasing order
    capture: Capture | None  # of the most ranks; None if the capture failed, for the reason in `remarks`
    remarks: tuple[str, ...] = ()

    @property
    def sides(self) -> tuple[Measurement, ...]:
        """The sides by number of ranks, starting with one."""
        return (self.comparisons[0].baseline, *(comparison.candidate for comparison in self.comparisons))

    @property
    def most(self) -> Comparison:
        """The comparison with the most ranks."""
        return self.comparisons[-1]

    @cached_property
    def trace(self) -> Trace | None:
        return None if self.capture is None else self.capture.trace()

    @cached_property
    def collectives(self) -> Collectives | None:
        """The collectives of the capture, with the waits of the ranks."""
        return None if self.trace is None else collectives(self.trace)

    def case(self) -> dict[str, Any]:
        return self.most.case.model_dump(exclude={"tp", "threads"})

    def rows(self) -> list[dict[str, Any]]:
        """A row for each number of ranks."""
        ratios = [None, *(comparison.ratio("per_token") for comparison in self.comparisons)]
        grades = [None, *(comparison.trust().trustworthy for comparison in self.comparisons)]
        return [
            {
                "ranks": side.case.tp,
                "threads": side.case.threads,
                "per_token_ms": side.per_token_ms,
                "first_token_ms": side.ttft_ms,
                "times_faster": ratio and ratio.value,
                "low": ratio and ratio.low,
                "high": ratio and ratio.high,
                "trustworthy": trustworthy,
                "share_of_limit": side.floor_share,
                "most_waiting": max(side.communication_shares, default=0.0),
            }
            for side, ratio, trustworthy in zip(self.sides, ratios, grades, strict=True)
        ]

    @property
    def claim(self) -> str:
        """The gain of the most ranks over one, with the interval, and the gain that the memory allows."""
        comparison, case = self.most, self.most.case
        limit = comparison.limit_ratio
        allowed = "" if limit is None else f"; the memory allows {limit:.2f}x"
        waits = max(comparison.candidate.communication_shares)
        return (
            f"{case.model}, {case.dtype}: {case.tp} ranks of {_threads(case.threads)} against one, per token: "
            f"{comparison.claim()}{allowed}; they wait for each other in at most {waits:.0%} of a step"
        )

    @property
    def headline(self) -> str:
        """The claim, and its grade."""
        return self.most.trust().explained(self.claim)

    @property
    def outcome(self) -> Outcome:
        return Outcome.graded(self.claim, self.most.trust(), self.most.candidate.environment.machine)


def study_parallel(
    *,
    model: Model = "gpt2",
    tp_sizes: Annotated[
        str,
        StudySetting(
            "numbers of ranks, separated by commas; 1 is always measured",
            choices=("1,2", "1,2,4", "1,2,4,8"),
            check=parse_sizes,
        ),
    ] = "1,2",
    dtype: FloatDtype = "float32",
    prompt_tokens: PromptTokens = 128,
    new_tokens: NewTokens = 64,
    rounds: Epochs = 0,
    threads: RankThreads = 0,
    output: str | os.PathLike[str] = RUNS,
    progress: Progress | None = None,
    show: Show = unseen,
) -> ParallelStudy:
    """Measures the fused engine on one rank and on several numbers of ranks, which take turns of a few tokens in
    epochs, and captures some steps of the most ranks.

    - rounds: number of epochs; 0: until there is a verdict on each number of ranks, a minute at most.
    - output: folder for the records and the capture.
    - progress: receives the progress.
    - show: receives the study with the parts that are measured so far.

    ValueError as from `take_turns`, and for `tp_sizes` without a number above 1.
    """
    sizes = parse_sizes(tp_sizes)
    threads = threads or max(1, usable_processors() // sizes[-1])
    hf_config = resolve(model).hf_config
    config = model_config_of(hf_config)
    follow = progress or unheard
    totals: list[float] = []  # the number of steps is known when the first run begins

    def follow_runs(done: float, total: float, label: str) -> None:
        totals[:] = [total]
        follow(done, total + 1, label)

    turns = take_turns(
        [SideSpec("fused", threads, size) for size in sizes],
        comparison_case(model=model, dtype=dtype, batch=1, prompt=prompt_tokens, new=new_tokens, threads=threads),
        Schedule(rounds=rounds or None, budget_s=None if rounds else BUDGET_S),
        decided=first_is_decided,
        output=output,
        progress=follow_runs,
    )
    comparisons = tuple(turns.comparison(0, candidate) for candidate in range(1, len(sizes)))
    for comparison in comparisons:
        save_or_warn(comparison, output)
    show(so_far(ParallelStudy, config=config, comparisons=comparisons))
    if turns.interrupted:  # the records are written; without this the capture would begin
        raise KeyboardInterrupt
    (total,) = totals
    follow(total, total + 1, f"capturing {sizes[-1]} ranks")
    capture, remarks = _captured(
        model, sizes[-1], prompt=min(prompt_tokens, 32), dtype=dtype, threads=threads, output=output
    )
    follow(total + 1, total + 1, "done")
    return ParallelStudy(config, comparisons, capture, remarks)


def _captured(model: str, ranks: int, **options: Any) -> tuple[Capture | None, tuple[str, ...]]:
    """A capture of some steps of the ranks, or None and a remark: what was measured counts without it."""
    try:
        return capture_ranks(model, ranks, steps=STEPS, timeout_s=CAPTURE_S, **options), ()
    except (CaptureError, UserError) as error:
        return None, (f"the ranks could not be captured: {error}",)


def parse_sizes(text: str) -> list[int]:
    """The numbers of ranks in "1,2,4" in increasing order, always with 1. UserError for anything else."""
    expected = "numbers of ranks, one of them above 1, such as '1,2'"
    sizes = listed_counts("tp_sizes", text, expected)
    if sizes[-1] < 2:
        raise UserError(f"got tp_sizes = {text!r}, expected {expected}")
    return sorted({1, *sizes})


def _threads(count: int) -> str:
    return f"{count} thread{'s' if count > 1 else ''}"
