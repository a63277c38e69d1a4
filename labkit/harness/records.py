"""Records of one side's runs. They hold raw samples, from which summaries are computed on demand."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from pydantic import Field

from labkit.engine.runners.stage_clock import StageTime
from labkit.harness.environment import Environment
from labkit.harness.expert_reads import ExpertReads
from labkit.harness.frozen_record import ResultRecord
from labkit.harness.roofline import Work
from labkit.harness.runs import Case, Run
from labkit.harness.timing import CLOCK
from labkit.stages import EXCHANGES, Phase
from labkit.statistics import ShareOfLimit, Summary, first_is_slow, remarks, summarise, taken_cores
from labkit.statistics.summaries import median_of
from labkit.system.result_table import ResultTable, Tabular, frame_of

if TYPE_CHECKING:
    import pandas as pd

METRICS = ("ttft", "per_token", "end_to_end")
MOST_LEFT_OUT = 0.02  # of the bytes of a step, before a measurement says so
FIRST_TOKEN, PER_TOKEN = "first token", "per token"  # phases of samples, in words


class Measurement(Tabular, ResultRecord):
    """The runs of one side on one case. Times are in milliseconds, and MB are 10^6 bytes.

    A side on several ranks has the time of the slowest rank, step by step, and the memory of the largest rank.
    """

    kind: Literal["measurement"] = "measurement"
    name: str
    impl: str
    case: Case
    environment: Environment
    work: Work | None  # None: the work of this architecture is not counted
    runs: tuple[Run, ...] = Field(min_length=1)
    clock: str = CLOCK
    weights: str = ""  # stored type of the matrices, in its library's words; empty in older records
    placed_anew: bool = False  # whether the weights were put into new memory before each epoch
    reading: str = ""  # how decode steps read the weights at the end, and how often that changed; CPU engine only
    peak_gflop_s: float | None = None  # peak multiplications and additions of all threads; CPU only
    probe: str = ""  # the way of reading that set the limit, and in how many of the probes
    load_s: float | None = None
    start_to_ready_s: float | None = None  # imports, loading and the first warm-up run, without waiting for a turn
    memory_limit: str = ""  # what enforced the side's memory limit; empty: nothing
    peak_limited_mb: float | None = None  # peak of the limited memory, of all ranks; a cgroup counts files' pages too
    streamed_mb: float = 0.0  # weights that the engine reads from the disk in each step
    question: str = ""  # asked once after the timed runs; empty: none
    answer: str | None = None  # of a chat model to the question
    first_run_s: float | None = None  # the first warm-up run, with compilation
    peak_rss_mb: float | None = None  # peak above the level before loading; on a GPU, of the GPU's memory
    stages: tuple[StageTime, ...] = ()  # from one extra run, never from a timed run
    stage_run: Run | None = None  # times of the extra run, which show the cost of collecting the stages
    rank_stages: tuple[tuple[StageTime, ...], ...] = ()  # stages of each of several ranks; `stages` are rank 0's
    nodes: tuple[tuple[str, str], ...] = ()  # kernel and stage of each node of a step's CUDA graph
    replaced: tuple[str, ...] = ()  # of a model with hooks: number, kind and paths of the parts on labkit's kernels

    @property
    def kinds_replaced(self) -> str:
        """The parts that hooks replaced, without their paths: "16 x MLP, 1 x head"; empty: none."""
        counts: Counter[str] = Counter()
        for part in self.replaced:
            number, _, kind = part.partition(":")[0].partition(" x ")
            counts[kind] += int(number)
        return ", ".join(f"{count} x {kind}" for kind, count in counts.items())

    @property
    def in_epochs(self) -> bool:
        """Whether the runs are epochs of turns, rather than whole generations."""
        return all(run.turns for run in self.runs)

    @property
    def samples_ms(self) -> dict[str, tuple[float, ...]]:
        """All raw samples by metric; "per_token" holds every decode step of every run."""
        return {
            "ttft": self.rounds_ms("ttft"),
            "per_token": tuple(step for run in self.runs for step in run.decode_ms),
            "end_to_end": tuple(run.end_to_end_ms for run in self.runs),
        }

    def rounds_ms(self, metric: str) -> tuple[float, ...]:
        """One figure per run; for "per_token" the run's median step, and for "ttft" only of runs that have a prompt."""
        return tuple(getattr(run, f"{metric}_ms") for run in self.runs if metric != "ttft" or run.has_prompt)

    def summary(self, metric: str) -> Summary:
        """Distribution of all raw samples of a metric."""
        return summarise(self.samples_ms[metric])

    @property
    def ttft_ms(self) -> float:
        return float(np.median(self.rounds_ms("ttft")))

    @property
    def per_token_ms(self) -> float:
        """Median over runs of the run's median decode step."""
        return float(np.median(self.rounds_ms("per_token")))

    @property
    def per_token_mean_ms(self) -> float:
        return float(np.mean(self.samples_ms["per_token"]))

    @property
    def end_to_end_ms(self) -> float:
        return float(np.median(self.rounds_ms("end_to_end")))

    @property
    def tokens_per_s(self) -> float:
        """New tokens of the whole batch per second of decoding."""
        return self.case.batch * 1e3 / self.per_token_ms

    @property
    def read_bandwidth_gb_s(self) -> float | None:
        return median_of(probe for run in self.runs for probe in run.probes_gb_s)

    @property
    def disk_gb_s(self) -> float | None:
        """The median rate of the disk around the runs."""
        return median_of(probe for run in self.runs for probe in run.disk_gb_s or ())

    @property
    def disk_share(self) -> float | None:
        """For an engine with layers or experts on the disk: the least time to read what the steps read / the time of
        these steps, median over runs. Each run counts with the rate probed around it.
        """
        return median_of([run.disk_share(self.streamed_mb) for run in self.runs])

    @property
    def expert_reads(self) -> ExpertReads | None:
        """The experts that the steps of all runs read from the disk; None: the side has none there."""
        return ExpertReads.sum_of(run.experts for run in self.runs if run.experts)

    @property
    def floor_ms(self) -> float | None:
        """The least time of a decode step at the median bandwidth around the runs."""
        bandwidth = self.read_bandwidth_gb_s
        return None if self.work is None or bandwidth is None else self.work.floor_ms(bandwidth, self.peak_gflop_s)

    @property
    def floor_share(self) -> float | None:
        """Share of the physical limit: median over runs, each with the bandwidth probed around it."""
        work = self.work
        return median_of([run.floor_share(work, self.peak_gflop_s) for run in self.runs]) if work else None

    @property
    def prompt_share(self) -> float | None:
        """The first token's share of the limit; None where the processor's peak rate is unknown."""
        work, peak = self.work, self.peak_gflop_s
        return median_of([run.prompt_share(work, peak) for run in self.runs]) if work and peak else None

    @property
    def share_of_limit(self) -> ShareOfLimit | None:
        """Share of the limit with the noise of its probes. None: unknown, or the whole model fits into the caches, so
        that memory is not the limit.
        """
        cache_mb = self.environment.cache_mb
        if self.floor_share is None or self.work is None:
            return None
        if cache_mb is not None and self.environment.gpu is None and self.work.weight_bytes <= cache_mb * 1e6:
            return None
        around = [run.bandwidth_gb_s for run in self.runs if run.bandwidth_gb_s]
        noise = median_of([float(abs(np.log(after / before))) for before, after in around])  # none between turns
        return ShareOfLimit(self.name, self.floor_share, noise or 0.0)

    @property
    def taken_cores(self) -> tuple[float, ...]:
        """Processors that this side needed and other programs kept busy, by run; runs without a figure are left out."""
        needed = self.case.cores if self.environment.gpu is None else 1
        known = [run.others_cores for run in self.runs if run.others_cores is not None]
        return tuple(taken_cores(others_cores, needed=needed, cores=self.environment.cores) for others_cores in known)

    @property
    def prefill_gflop_s(self) -> float | None:
        return self.work.prefill_flops / self.ttft_ms / 1e6 if self.work else None

    @property
    def communication_shares(self) -> tuple[float, ...]:
        """Share of a decode step in which a rank waited for the others, by rank; empty for one rank."""
        shares = []
        for stages in self.rank_stages:
            decode = [stage for stage in stages if stage.phase == Phase.DECODE]
            waited = sum(stage.total_ms for stage in decode if stage.stage in EXCHANGES)
            shares.append(waited / sum(stage.total_ms for stage in decode))
        return tuple(shares)

    @property
    def stage_tax(self) -> float | None:
        """Slow-down of a step while its stages were collected, as a fraction."""
        return self.stage_run.per_token_ms / self.per_token_ms - 1 if self.stage_run else None

    @property
    def remarks(self) -> tuple[str, ...]:
        """Weaknesses of these figures."""
        names = {metric: f"{self.name} {metric.replace('_', ' ')}" for metric in METRICS}
        weaknesses = [line for metric, name in names.items() for line in remarks(name, self.samples_ms[metric])]
        if first_is_slow(self.rounds_ms("per_token")):
            weaknesses.append(f"{self.name}: the first round was slow; warm up longer")
        if self.floor_share is None:
            weaknesses.append(
                f"{self.name}: share of the physical limit unknown (no bandwidth probe, or work not counted)"
            )
        if self.left_out > MOST_LEFT_OUT:
            weaknesses.append(
                f"{self.name}: epochs end before a generation does, so the measured steps read {self.left_out:.1%} "
                f"less than the average step of {self.case.new_tokens} tokens"
            )
        return tuple(weaknesses)

    @property
    def left_out(self) -> float:
        """By how much less memory the measured steps read than the average step of a whole generation, a fraction. An
        epoch may end before a generation does, and the later steps have longer contexts.
        """
        further = [turn.further_tokens for run in self.runs for turn in run.turns]
        if not further or self.work is None:
            return 0.0
        return -float(np.mean(further)) * self.work.bytes_per_token / self.work.decode_bytes

    def as_dict(self) -> dict[str, Any]:
        """Figures of one side, as `labkit compare --json` shows them."""
        return {
            "name": self.name,
            "impl": self.impl,
            "weights": self.weights,
            "ttft_ms": self.ttft_ms,
            "per_token_ms": self.per_token_ms,
            "per_token_mean_ms": self.per_token_mean_ms,
            "end_to_end_ms": self.end_to_end_ms,
            "tokens_per_s": self.tokens_per_s,
            "floor_ms": self.floor_ms,
            "floor_share": self.floor_share,
            "prompt_share": self.prompt_share,
            "peak_gflop_s": self.peak_gflop_s,
            "prefill_gflop_s": self.prefill_gflop_s,
            "peak_rss_mb": self.peak_rss_mb,
            "weights_and_kv_mb": (self.work.weight_bytes + self.work.kv_bytes) / 1e6 if self.work else None,
            "load_s": self.load_s,
            "start_to_ready_s": self.start_to_ready_s,
            "first_run_s": self.first_run_s,
            "communication_shares": list(self.communication_shares),
        }

    def sample_rows(self) -> list[dict[str, Any]]:
        """Every raw sample with its machine, case, side and run, and its new token, counted from 0."""
        head = {"machine": self.environment.machine, **self.case.model_dump()}
        return [
            head
            | {
                "side": self.name,
                "impl": self.impl,
                "round": run.round,
                "phase": PER_TOKEN if token else FIRST_TOKEN,
                "token": token,
                "ms": took,
            }
            for run in self.runs
            for token, took in enumerate((run.ttft_ms, *run.decode_ms))
            if token or run.has_prompt
        ]

    def to_frame(self) -> pd.DataFrame:
        """A row for each new token of each run, in milliseconds: `sample_rows`."""
        return frame_of(self.sample_rows())

    def table(self) -> ResultTable:
        """The distributions of all samples."""
        metrics = {f"{PER_TOKEN}, ms": "per_token", f"{FIRST_TOKEN}, ms": "ttft", "end to end, ms": "end_to_end"}
        summaries = {row: self.summary(metric) for row, metric in metrics.items()}
        return ResultTable(
            title=self.case.title,
            columns=(self.name, "median", "mean", "P95", "samples"),
            rows=tuple(
                (row, f"{summary.median:.2f}", f"{summary.mean:.2f}", summary.p95_text, f"{summary.n:,}")
                for row, summary in summaries.items()
            ),
            notes=(
                f"{self.tokens_per_s:.1f} tokens / s; share of the limit: {number_or_unknown(self.floor_share, '.0%')}",
                f"weights: {self.case.origin}; computed by {self.impl}",
                f"machine: {self.environment.machine}",
            ),
        )

    def __str__(self) -> str:
        """The sentence that the articles print about the time of the whole call."""
        latency = self.summary("end_to_end")
        return f"P95 latency (ms) - {latency.p95_text}; Average latency (ms) - {latency.mean:.2f} +- {latency.std:.2f};"


def number_or_unknown(value: float | None, form: str) -> str:
    """A figure in this format; "unknown" for None."""
    return "unknown" if value is None else f"{value:{form}}"
