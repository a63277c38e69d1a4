"""What `make bench` measures, and the bar that each figure has to clear: data, and the verdicts computed from it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from labkit.harness.compare.peers import LLAMA_CPP, LLAMA_CPP_INT8
from labkit.harness.records import Comparison, Measurement
from labkit.statistics import Ratio

PROMPT = NEW = 128
MEMORY = 1.15  # peak memory / (weights + KV cache), at most


@dataclass(frozen=True)
class Sides:
    """Who is measured in the same rounds: the candidate against the baseline and, if there is one, a peer."""

    baseline: str
    candidate: str
    peer: str

    @property
    def names(self) -> tuple[str, str, str]:
        return self.baseline, self.candidate, self.peer


FUSED = Sides("hf-eager", "fused", LLAMA_CPP)
INT8 = Sides("fused", "fused-int8", LLAMA_CPP_INT8)


@dataclass(frozen=True)
class Target:
    """One case, 128 + 128 tokens, and its bars. Ratios are baseline / candidate, at least; None: no bar.

    `dtype` is that of the sides whose weights are not int8.
    """

    model: str
    dtype: str
    batch: int
    per_token: float
    limit_share: float | None = None
    ttft: float | None = None
    llama_cpp: float | None = None  # per token; None: not compared
    sides: Sides = FUSED

    @property
    def name(self) -> str:
        kind = "int8" if self.sides is INT8 else self.dtype
        return f"{self.model} {kind}" + (f" batch {self.batch}" if self.batch > 1 else "")

    @property
    def key(self) -> tuple[str, str, int, str]:
        return self.model, self.dtype, self.batch, self.sides.candidate


TARGETS = (
    Target("gpt2", "float32", 1, per_token=2.4, limit_share=0.65, ttft=1.8, llama_cpp=1.1),
    Target("gpt2", "bfloat16", 1, per_token=3.9, limit_share=0.60, ttft=1.1, llama_cpp=1.2),
    Target("gpt2-medium", "float32", 1, per_token=2.6, limit_share=0.80, ttft=1.5, llama_cpp=1.1),
    Target("gpt2-medium", "bfloat16", 1, per_token=3.4, limit_share=0.70, ttft=1.0, llama_cpp=1.2),
    Target("bloom-560m", "float32", 1, per_token=2.6, limit_share=0.80, ttft=1.5, llama_cpp=1.1),
    Target("bloom-560m", "bfloat16", 1, per_token=3.4, limit_share=0.70, ttft=1.0, llama_cpp=1.2),
    Target("llama-shape", "float32", 1, per_token=2.6, limit_share=0.80, ttft=1.5, llama_cpp=1.1),
    Target("llama-shape", "bfloat16", 1, per_token=3.4, limit_share=0.70, ttft=1.0, llama_cpp=1.2),
    Target("gptj-shape", "float32", 1, per_token=2.6, limit_share=0.75, ttft=1.5),
    Target("gptj-shape", "bfloat16", 1, per_token=2.6, limit_share=0.65, ttft=1.0),
    Target("gpt2", "float32", 8, per_token=1.8),
    Target("llama-shape", "float32", 8, per_token=1.8),
    Target("gpt2", "bfloat16", 1, per_token=1.4, llama_cpp=1.4, sides=INT8),
    Target("gpt2-medium", "bfloat16", 1, per_token=1.4, limit_share=0.55, llama_cpp=1.4, sides=INT8),
    Target("bloom-560m", "bfloat16", 1, per_token=1.4, limit_share=0.55, llama_cpp=1.4, sides=INT8),
    Target("llama-shape", "bfloat16", 1, per_token=1.4, limit_share=0.55, llama_cpp=1.4, sides=INT8),
    Target("gptj-shape", "bfloat16", 1, per_token=1.4, limit_share=0.55, sides=INT8),
)


@dataclass(frozen=True)
class Check:
    """A figure, the bar it was held against, and whether it cleared it.

    `close`: the bar lies within its interval. `possible`: the greatest figure that the memory allows, where the bar is
    past it.
    """

    what: str
    figure: str
    bar: str
    met: bool
    close: bool = False
    possible: float | None = None

    def __str__(self) -> str:
        verdict = f"{self.bar}: {'met' if self.met else 'missed'}{', within the interval' if self.close else ''}"
        return verdict if self.possible is None else f"{verdict}; at the limit it would be {self.possible:.2f}x"


@dataclass(frozen=True)
class Row:
    """A target and what was measured for it."""

    target: Target
    main: Comparison  # with the baseline
    peer: Comparison | None = None

    @property
    def comparisons(self) -> tuple[Comparison, ...]:
        return (self.main,) if self.peer is None else (self.main, self.peer)

    @property
    def sides(self) -> dict[str, Measurement]:
        """All sides by name, the candidate last."""
        baselines = {comparison.baseline.name: comparison.baseline for comparison in self.comparisons}
        return baselines | {self.main.candidate.name: self.main.candidate}

    @cached_property
    def checks(self) -> dict[str, Check]:
        """The bars that can be judged, by their field in `Target`, and "memory" and "tokens"."""
        target, candidate = self.target, self.main.candidate
        checks = {"per_token": _at_least(target.per_token, self.main, "per_token")}
        if target.limit_share is not None and candidate.floor_share is not None:
            met = candidate.floor_share >= target.limit_share
            bar = f"≥ {target.limit_share:.0%}"
            checks["limit_share"] = Check("share of the limit", f"{candidate.floor_share:.0%}", bar, met)
        if target.ttft is not None:
            checks["ttft"] = _at_least(target.ttft, self.main, "ttft")
        if target.llama_cpp is not None and self.peer is not None:
            checks["llama_cpp"] = _at_least(target.llama_cpp, self.peer, "per_token")
        if memory := memory_share(candidate):
            checks["memory"] = Check("peak memory", f"{memory:.2f}x", f"≤ {MEMORY}x", memory <= MEMORY)
        if target.dtype == "float32" and target.sides is FUSED:
            equal = self.main.tokens_equal
            checks["tokens"] = Check("tokens", tokens(self.main), "equal", equal)
        return checks


def rows(records: Iterable[Comparison]) -> list[Row]:
    """The targets that the records cover, in their order; the latest record of a kind counts."""
    found = {(*key(record), record.baseline.name): record for record in records}
    return [
        Row(target, found[*target.key, target.sides.baseline], found.get((*target.key, target.sides.peer)))
        for target in TARGETS
        if (*target.key, target.sides.baseline) in found
    ]


def key(record: Comparison) -> tuple[str, str, int, str]:
    """What `Target.key` is for a record."""
    return record.case.model, record.case.dtype, record.case.batch, record.candidate.name


def memory_share(side: Measurement) -> float | None:
    """Peak memory of a side over the weights and KV cache of its case."""
    if side.peak_rss_mb is None or side.work is None:
        return None
    return side.peak_rss_mb * 1e6 / (side.work.weight_bytes + side.work.kv_bytes)


def tokens(comparison: Comparison) -> str:
    """How far both sides agree."""
    return "equal" if comparison.tokens_equal else f"differ from new token {comparison.first_difference} on"


def _at_least(bar: float, comparison: Comparison, metric: str) -> Check:
    ratio = comparison.ratio(metric)
    when = "to the first token" if metric == "ttft" else "per token"
    what = f"{comparison.baseline.name} / {comparison.candidate.name} {when}"
    met, share = ratio.value >= bar, comparison.candidate.floor_share if metric == "per_token" else None
    close = ratio.low < bar <= ratio.high
    return Check(what, str(ratio), f"≥ {bar}x", met, close=close, possible=short_of(bar, ratio, share))


def short_of(bar: float, ratio: Ratio, share: float | None) -> float | None:
    """The ratio of a candidate that is at the limit instead of at `share` of it, where even that is below the bar."""
    return ratio.value / share if share and max(ratio.value, ratio.value / share) < bar else None
