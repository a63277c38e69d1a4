"""Records of what one side did. They hold raw samples; every summary is computed from them when it is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from pydantic import ConfigDict, Field

from labkit.engine.runners.stage_clock import StageTime
from labkit.harness.environment import Environment
from labkit.harness.roofline import Work
from labkit.harness.timing import CLOCK, Times
from labkit.stages import EXCHANGES, Phase
from labkit.statistics import ShareOfLimit, Summary, first_is_slow, remarks, summarise, taken_cores
from labkit.system.result_table import ResultTable, Tabular
from labkit.system.short_repr import ShortRepr

if TYPE_CHECKING:
    import pandas as pd

SCHEMA_VERSION: Literal[1] = 1
METRICS = ("ttft", "per_token", "end_to_end")
FIRST_TOKEN, PER_TOKEN = "first token", "per token"  # the phases of samples, in words


class FrozenRecord(ShortRepr):
    """A record that cannot be changed, and that refuses unknown fields when it is read back."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Case(FrozenRecord):
    """What is generated, with which model and on how many threads: what measuring functions take and records keep.

    `origin` says where the weights came from; it is empty until they have been found. The model is cut for `pp` stages
    of `tp` ranks, each of `threads` threads; `schedule` is that of the stages, empty where there is one. Each side may
    take `memory_gb` GB (1e9 bytes) of memory beyond what it imports; None: all that there is.
    """

    model: str
    origin: str = ""
    dtype: str
    batch: int
    prompt_tokens: int
    new_tokens: int
    threads: int
    tp: int = 1
    pp: int = 1
    schedule: str = ""
    memory_gb: float | None = None

    @property
    def ranks(self) -> int:
        return self.tp * self.pp

    @property
    def cores(self) -> int:
        """The processors that the threads of all ranks keep busy, on a CPU."""
        return self.threads * self.ranks

    @property
    def title(self) -> str:
        """The case in a line."""
        room = "" if self.memory_gb is None else f", {self.memory_gb:g} GB of memory"
        return f"{self.model}, {self.dtype}, batch {self.batch}, {self.prompt_tokens} + {self.new_tokens} tokens{room}"


class Run(FrozenRecord):
    """One timed generation, and the read bandwidth probed just before and just after it (None: no probe here).

    `others_cores`: processors that other programs kept busy around this run (None: nobody looked, or too short a time).
    For a side whose memory is limited, and which reads files: `disk_gb_s`, the rate of their disk just before and just
    after the run, and `cached_mb`, how much of them was in the page cache before it, after they had been made cold:
    what a side maps stays there.
    """

    round: int
    ttft_ms: float
    decode_ms: tuple[float, ...]
    end_to_end_ms: float
    bandwidth_gb_s: tuple[float, float] | None = None
    others_cores: float | None = None
    disk_gb_s: tuple[float, float] | None = None
    cached_mb: float | None = None

    @classmethod
    def of(cls, times: Times, *, round: int, before: float | None, after: float | None) -> Run:
        probes = None if before is None or after is None else (before, after)
        return cls(round=round, bandwidth_gb_s=probes, **asdict(times))

    @property
    def per_token_ms(self) -> float:
        """Median decode step of this run."""
        return float(np.median(self.decode_ms))

    def floor_share(self, work: Work, peak_gflop_s: float | None = None) -> float | None:
        """The least time that the memory beside this run, and the processor, allowed for a decode step / the time it
        took.
        """
        if self.bandwidth_gb_s is None:
            return None
        return work.floor_ms(float(np.mean(self.bandwidth_gb_s)), peak_gflop_s) / self.per_token_ms

    def prompt_share(self, work: Work, peak_gflop_s: float) -> float | None:
        """The same of the first token."""
        if self.bandwidth_gb_s is None:
            return None
        return work.prompt_floor_ms(peak_gflop_s, float(np.mean(self.bandwidth_gb_s))) / self.ttft_ms


class Measurement(Tabular, FrozenRecord):
    """The runs of one side on one case. Times are in milliseconds, and MB are 10^6 bytes.

    For a side on several ranks each time is that of the slowest rank, step by step, and memory is that of the largest.
    """

    kind: Literal["measurement"] = "measurement"
    schema_version: Literal[1] = SCHEMA_VERSION
    created: datetime = Field(default_factory=lambda: datetime.now(UTC))
    name: str
    impl: str
    case: Case
    environment: Environment
    work: Work | None  # None: the work of this architecture is not counted
    runs: tuple[Run, ...] = Field(min_length=1)
    clock: str = CLOCK
    weights: str = ""  # the type that the matrices are stored in, as its library calls it; empty in older records
    reading: str = ""  # how decode steps read the weights at the end, and how often that changed; CPU engine only
    peak_gflop_s: float | None = None  # multiplications and additions of all threads, at most; CPU only
    probe: str = ""  # the way to read that set the limit, and in how many of the probes
    load_s: float | None = None
    start_to_ready_s: float | None = None  # imports, loading and the first warm-up run, without waiting for a turn
    memory_limit: str = ""  # what held the side to its memory; empty: nothing did
    peak_limited_mb: float | None = None  # the most that counts there, of all ranks; in a cgroup files' pages do
    streamed_mb: float = 0.0  # of weights that the engine reads from the disk in each step
    question: str = ""  # asked once behind the timed runs; empty: none
    answer: str | None = None  # of a chat model to it
    first_run_s: float | None = None  # the first warm-up run, compilation included
    peak_rss_mb: float | None = None  # more than before the weights were loaded; on a GPU, of the GPU's memory
    stages: tuple[StageTime, ...] = ()  # from one extra run, never from the timed ones
    stage_run: Run | None = None  # the times of the extra run, which show what collecting the stages costs
    rank_stages: tuple[tuple[StageTime, ...], ...] = ()  # of each of several ranks; `stages` are those of rank 0
    nodes: tuple[tuple[str, str], ...] = ()  # kernel and stage of each node of a step's CUDA graph

    @property
    def samples_ms(self) -> dict[str, tuple[float, ...]]:
        """All raw samples by metric; "per_token" holds every decode step of every run."""
        return {
            "ttft": tuple(run.ttft_ms for run in self.runs),
            "per_token": tuple(step for run in self.runs for step in run.decode_ms),
            "end_to_end": tuple(run.end_to_end_ms for run in self.runs),
        }

    def rounds_ms(self, metric: str) -> tuple[float, ...]:
        """One figure per run: for "per_token" the run's median step."""
        return tuple(getattr(run, f"{metric}_ms") for run in self.runs)

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
        probes = [probe for run in self.runs for probe in run.bandwidth_gb_s or ()]
        return float(np.median(probes)) if probes else None

    @property
    def disk_gb_s(self) -> float | None:
        """The median rate of the disk beside the runs."""
        probes = [probe for run in self.runs for probe in run.disk_gb_s or ()]
        return float(np.median(probes)) if probes else None

    @property
    def disk_share(self) -> float | None:
        """For the engine with layers on the disk: the least time in which that gives them / the time of a step, median
        over runs, each against the rate probed beside it.
        """
        rates = [(run, float(np.mean(run.disk_gb_s))) for run in self.runs if run.disk_gb_s]
        found = [self.streamed_mb / rate / run.per_token_ms for run, rate in rates]
        return _median(found) if self.streamed_mb else None

    @property
    def floor_ms(self) -> float | None:
        """The least time of a decode step at the median bandwidth beside the runs."""
        bandwidth = self.read_bandwidth_gb_s
        return None if self.work is None or bandwidth is None else self.work.floor_ms(bandwidth, self.peak_gflop_s)

    @property
    def floor_share(self) -> float | None:
        """Share of the physical limit: median over runs, each against the bandwidth probed beside it."""
        work = self.work
        return _median([run.floor_share(work, self.peak_gflop_s) for run in self.runs]) if work else None

    @property
    def prompt_share(self) -> float | None:
        """The same of the first token; None where nobody knows how fast the processor multiplies."""
        work, peak = self.work, self.peak_gflop_s
        return _median([run.prompt_share(work, peak) for run in self.runs]) if work and peak else None

    @property
    def share_of_limit(self) -> ShareOfLimit | None:
        """The share and how far to believe it. None where it is unknown, and where the whole model fits into the
        caches, so that the memory does not limit it.
        """
        cache_mb = self.environment.cache_mb
        if self.floor_share is None or self.work is None:
            return None
        if cache_mb is not None and self.environment.gpu is None and self.work.weight_bytes <= cache_mb * 1e6:
            return None
        probes = [run.bandwidth_gb_s for run in self.runs if run.bandwidth_gb_s]
        noise = float(np.median([abs(np.log(after / before)) for before, after in probes]))
        return ShareOfLimit(self.name, self.floor_share, noise)

    @property
    def taken_cores(self) -> tuple[float, ...]:
        """By run, where it is known, how many of the processors that this side needed other programs kept busy."""
        needed = self.case.cores if self.environment.gpu is None else 1
        known = [run.others_cores for run in self.runs if run.others_cores is not None]
        return tuple(taken_cores(others, needed=needed, cores=self.environment.cores) for others in known)

    @property
    def prefill_gflop_s(self) -> float | None:
        return self.work.prefill_flops / self.ttft_ms / 1e6 if self.work else None

    @property
    def communication_shares(self) -> tuple[float, ...]:
        """By rank, the share of a decode step's time in which it waited for the others; empty for one rank."""
        shares = []
        for stages in self.rank_stages:
            decode = [stage for stage in stages if stage.phase == Phase.DECODE]
            waited = sum(stage.total_ms for stage in decode if stage.stage in EXCHANGES)
            shares.append(waited / sum(stage.total_ms for stage in decode))
        return tuple(shares)

    @property
    def stage_tax(self) -> float | None:
        """How much longer a step took while its stages were collected, as a fraction."""
        return self.stage_run.per_token_ms / self.per_token_ms - 1 if self.stage_run else None

    @property
    def remarks(self) -> tuple[str, ...]:
        """What weakens these figures."""
        names = {metric: f"{self.name} {metric.replace('_', ' ')}" for metric in METRICS}
        found = [line for metric, name in names.items() for line in remarks(name, self.samples_ms[metric])]
        if first_is_slow(self.rounds_ms("per_token")):
            found.append(f"{self.name}: the first round was slow; warm up longer")
        if self.floor_share is None:
            found.append(f"{self.name}: share of the physical limit unknown (no bandwidth probe, or work not counted)")
        return tuple(found)

    def as_dict(self) -> dict[str, Any]:
        """The figures of one side, as `labkit compare --json` shows them."""
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
        """Every raw sample: its case, machine, side and run, and its new token, counted from 0."""
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
        ]

    def to_frame(self) -> pd.DataFrame:
        """A row for each new token of each run, in milliseconds: `sample_rows`."""
        import pandas as pd  # half a second

        return pd.DataFrame(self.sample_rows())

    def table(self) -> ResultTable:
        """The distributions of all samples."""
        summaries = {f"{PER_TOKEN}, ms": "per_token", f"{FIRST_TOKEN}, ms": "ttft", "end to end, ms": "end_to_end"}
        found = {row: self.summary(metric) for row, metric in summaries.items()}
        share = "unknown" if self.floor_share is None else f"{self.floor_share:.0%}"
        return ResultTable(
            title=self.case.title,
            columns=(self.name, "median", "mean", "P95", "samples"),
            rows=tuple(
                (row, f"{each.median:.2f}", f"{each.mean:.2f}", each.p95_text, f"{each.n:,}")
                for row, each in found.items()
            ),
            notes=(
                f"{self.tokens_per_s:.1f} tokens / s; share of the limit: {share}",
                f"weights: {self.case.origin}; computed by {self.impl}",
                f"machine: {self.environment.machine}",
            ),
        )

    def __str__(self) -> str:
        """The sentence that the articles print about the time of the whole call."""
        latency = self.summary("end_to_end")
        return f"P95 latency (ms) - {latency.p95_text}; Average latency (ms) - {latency.mean:.2f} +- {latency.std:.2f};"


def _median(shares: Sequence[float | None]) -> float | None:
    return float(np.median(known)) if (known := [share for share in shares if share is not None]) else None
