"""What `make bench` measures, and the bar that each figure has to clear: data, and the verdicts computed from it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from labkit.harness.peers import LLAMA_CPP
from labkit.harness.records import Comparison, Measurement

VANILLA, FUSED = "hf-eager", "fused"
PROMPT = NEW = 128
MEMORY = 1.15  # peak memory / (weights + KV cache), at most


@dataclass(frozen=True)
class Target:
    """One case, 128 + 128 tokens, and its bars. Ratios are baseline / fused, at least; None: no bar."""

    model: str
    dtype: str
    batch: int
    per_token: float
    limit_share: float | None = None
    ttft: float | None = None
    llama_cpp: float | None = None  # per token; None: not compared

    @property
    def name(self) -> str:
        return f"{self.model} {self.dtype}" + (f" batch {self.batch}" if self.batch > 1 else "")

    @property
    def key(self) -> tuple[str, str, int]:
        return self.model, self.dtype, self.batch


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
    vanilla: Comparison
    peer: Comparison | None = None

    @property
    def comparisons(self) -> tuple[Comparison, ...]:
        return (self.vanilla,) if self.peer is None else (self.vanilla, self.peer)

    @property
    def sides(self) -> dict[str, Measurement]:
        """All sides by name, the fused one last."""
        baselines = {comparison.baseline.name: comparison.baseline for comparison in self.comparisons}
        return baselines | {FUSED: self.vanilla.candidate}

    @cached_property
    def checks(self) -> dict[str, Check]:
        """The bars that can be judged, by their field in `Target`, and "memory" and "tokens"."""
        target, fused = self.target, self.vanilla.candidate
        checks = {"per_token": _at_least(target.per_token, self.vanilla, "per_token")}
        if target.limit_share is not None and fused.floor_share is not None:
            met = fused.floor_share >= target.limit_share
            bar = f"≥ {target.limit_share:.0%}"
            checks["limit_share"] = Check("share of the limit", f"{fused.floor_share:.0%}", bar, met)
        if target.ttft is not None:
            checks["ttft"] = _at_least(target.ttft, self.vanilla, "ttft")
        if target.llama_cpp is not None and self.peer is not None:
            checks["llama_cpp"] = _at_least(target.llama_cpp, self.peer, "per_token")
        if memory := memory_share(fused):
            checks["memory"] = Check("peak memory", f"{memory:.2f}x", f"≤ {MEMORY}x", memory <= MEMORY)
        if target.dtype == "float32":
            equal = self.vanilla.tokens_equal
            checks["tokens"] = Check("tokens", tokens(self.vanilla), "equal", equal)
        return checks


def rows(records: Iterable[Comparison]) -> list[Row]:
    """The targets that the records cover, in their order; the latest record of a kind counts."""
    found = {
        (record.case.model, record.case.dtype, record.case.batch, record.baseline.name): record for record in records
    }
    return [
        Row(target, found[*target.key, VANILLA], found.get((*target.key, LLAMA_CPP)))
        for target in TARGETS
        if (*target.key, VANILLA) in found
    ]


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
    what = f"{comparison.baseline.name} / {FUSED} {'to the first token' if metric == 'ttft' else 'per token'}"
    met, share = ratio.value >= bar, comparison.baseline.floor_share if metric == "per_token" else None
    possible = 1 / share if not met and share and 1 / share < bar else None
    return Check(what, str(ratio), f"≥ {bar}x", met, close=ratio.low < bar <= ratio.high, possible=possible)
