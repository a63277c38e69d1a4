"""Record of two sides that were measured against each other, and the claims that it supports."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from labkit.harness.frozen_record import SCHEMA_VERSION, FrozenRecord
from labkit.harness.records import FIRST_TOKEN, METRICS, PER_TOKEN, Measurement, number_or_unknown
from labkit.harness.runs import Case, SharedWeights
from labkit.harness.turns.pairs import EpochScatter, Logs, by_rate_of, pair_logs, pair_rates, pairs_frame, scatter_of
from labkit.statistics import Ratio, Trust, Verdict, grade, ratio
from labkit.statistics.rates import RatioByRate
from labkit.statistics.resolution import TellsApart
from labkit.statistics.sequential import (
    EPOCHS_SHARED,
    PROCESS_LUCK,
    ROUNDS,
    Rule,
    centre,
    confidence_after,
    more_rounds,
    more_rounds_text,
    ratio_after,
    rule_of_epochs,
    sequential_ratio,
)
from labkit.statistics.summaries import median_of
from labkit.statistics.trust import FEWEST_ROUNDS
from labkit.system.asked_from import offered, on_command_line, setting
from labkit.system.result_table import Claim, ResultTable, Tabular, frame_of

if TYPE_CHECKING:
    import pandas as pd

COLOURS = {Verdict.FASTER: "bold green", Verdict.SLOWER: "bold red", Verdict.SAME: "bold", Verdict.UNDECIDED: "yellow"}
FIGURES = {  # rows of the table: field of both sides, number format, metric of the ratio
    f"{PER_TOKEN}, ms": ("per_token_ms", ".2f", "per_token"),
    f"{FIRST_TOKEN}, ms": ("ttft_ms", ".1f", "ttft"),
    "end to end, ms": ("end_to_end_ms", ".0f", "end_to_end"),
    "tokens / s": ("tokens_per_s", ".1f", ""),
    "share of the limit": ("floor_share", ".0%", ""),
    "first token's share of the limit": ("prompt_share", ".0%", ""),
    "peak memory, MB": ("peak_rss_mb", ",.0f", ""),
}


class Comparison(Tabular, FrozenRecord):
    """Two sides that ran the same case, each in its own process, in the same rounds or in turns of a few tokens. Ratios
    are baseline / candidate.

    Turns belong to epochs, between which both sides put their weights into new memory. The ratio of an epoch is the
    centre of its pairs of turns, and its interval comes from the scatter between epochs.

    A comparison with `looks` has the ratios of `labkit.statistics.sequential`, whose intervals hold for all looks at
    once.
    """

    kind: Literal["comparison"] = "comparison"
    schema_version: Literal[1] = SCHEMA_VERSION
    baseline: Measurement
    candidate: Measurement
    tokens_equal: bool  # over all sequences of all rounds, position by position
    first_difference: int | None  # the earliest new token that differs, counted from 0
    looks: tuple[int, ...] = ()  # rounds or epochs after which the verdict was checked; empty: their number was fixed
    why_rounds: str = ""  # why the sides took no turns of tokens; empty in older records, too
    dropped_pairs: int = 0  # of turns, because the clock of the machine jumped meanwhile
    interrupted: bool = False  # by the user, before the schedule was done
    shared_weights: SharedWeights | None = None  # of two versions of one side; None: each side has its own
    tells_apart: TellsApart | None = None  # by the machine, as measured before; None: not known, or not used

    @property
    def case(self) -> Case:
        return self.candidate.case

    @property
    def rounds(self) -> int:
        """Number of rounds, or of epochs."""
        return len(self.candidate.runs)

    @property
    def in_epochs(self) -> bool:
        return self.baseline.in_epochs and self.candidate.in_epochs

    @property
    def unit(self) -> str:
        """The word for what `rounds` counts."""
        return "epoch" if self.in_epochs else "round"

    @property
    def rule(self) -> Rule:
        """What decides this comparison."""
        if not self.in_epochs:
            return ROUNDS
        shared = self.shared_weights is not None and self.shared_weights.mostly
        rule = EPOCHS_SHARED if shared and self.placed_anew else rule_of_epochs(self.placed_anew)
        return rule if self.tells_apart is None else rule.with_floor(self.tells_apart.difference)

    @property
    def placed_anew(self) -> bool:
        """Whether each epoch of both sides had its weights in new memory."""
        return all(side.placed_anew for side in (self.baseline, self.candidate))

    def ratio(self, metric: str) -> Ratio:
        """Baseline / candidate of "ttft", "per_token" or "end_to_end", with its interval over rounds or epochs."""
        if not self.looks and not self.in_epochs:
            return ratio(self.baseline.rounds_ms(metric), self.candidate.rounds_ms(metric))
        return ratio_after(self.logs(metric), len(self.looks), self.rule)

    def logs(self, metric: str) -> tuple[float, ...]:
        """Logarithm of baseline / candidate, one for each round or epoch. An epoch has the centre of its pairs of
        turns, and for the first token the centre of its prompts.
        """
        if self.in_epochs and metric != "end_to_end":
            return tuple(centre(logs) for logs in self.pair_logs(metric))
        baseline, candidate = self.baseline.rounds_ms(metric), self.candidate.rounds_ms(metric)
        return tuple(np.log(np.asarray(baseline) / np.asarray(candidate)).tolist())

    def pair_logs(self, metric: str = "per_token") -> list[Logs]:
        """Logarithm of baseline / candidate of each pair of turns, or of each prompt ("ttft"), by epoch."""
        return pair_logs(self.baseline.runs, self.candidate.runs, metric)

    def pair_rates(self) -> list[float | None]:
        """Read bandwidth that was probed in each pair, in GB/s, in the order of `pair_logs`."""
        return pair_rates(self.candidate.runs)

    @property
    def scatter(self) -> EpochScatter | None:
        """Scatter of the time per token between placements and inside of an epoch; None without two epochs."""
        return scatter_of(self.pair_logs()) if self.in_epochs else None

    @property
    def by_rate(self) -> RatioByRate | None:
        """How the ratio per token follows the rate of the memory; None where it does not, and in rounds."""
        return by_rate_of(self.candidate.runs, self.pair_logs()) if self.in_epochs else None

    @property
    def confidence(self) -> str:
        """Confidence of the ratios' intervals, for the head of a column."""
        return confidence_after(len(self.looks), self.rule)

    def trust(self, metric: str = "per_token") -> Trust:
        """Whether to believe the ratio of a metric; if not, why, and what to do."""
        sides = (self.baseline, self.candidate)
        shares = [share for side in sides if (share := side.share_of_limit) is not None]
        most = max((side.taken_cores for side in sides), key=sum)
        return grade(self.ratio(metric), self.rounds, taken_cores=most, shares=shares, unit=self.unit)

    @property
    def verdict(self) -> Verdict:
        """Verdict on the time per token; UNDECIDED also where its ratio is not trustworthy."""
        return self.verdict_of("per_token")

    def verdict_of(self, metric: str) -> Verdict:
        """Verdict on a metric; UNDECIDED also where its ratio is not trustworthy."""
        return self.trust(metric).verdict(self.ratio(metric).verdict)

    def claim(self, metric: str = "per_token") -> str:
        """The ratio with its interval, and its verdict or NOT TRUSTWORTHY, in a few words."""
        trusted = self.trust(metric).trustworthy
        return f"{self.ratio(metric)} {self.verdict_of(metric) if trusted else 'NOT TRUSTWORTHY'}"

    @property
    def so_far(self) -> str:
        """The ratio per token over the epochs so far, for a line that shows progress."""
        logs = self.logs("per_token")
        return str(sequential_ratio(logs, len(self.looks) + 1, self.rule))

    @property
    def more_rounds(self) -> int | None:
        """Estimated further rounds until a verdict. None: decided, not estimable, or more rounds would not make the
        ratio trustworthy.
        """
        undecided = self.verdict is Verdict.UNDECIDED and self.trust().mended_by_rounds
        return more_rounds(self.ratio("per_token"), self.rounds, self.rule) if undecided else None

    @property
    def read_bandwidth_gb_s(self) -> float | None:
        sides = (self.baseline.read_bandwidth_gb_s, self.candidate.read_bandwidth_gb_s)
        return None if None in sides else float(np.mean(sides))  # type: ignore[arg-type]

    @property
    def limit_ratio(self) -> float | None:
        """The largest gain that memory allows more ranks: the candidate's read bandwidth / the baseline's, median over
        rounds. Each is probed around its run, with all threads of its side. 1.0 where both sides have equally many
        threads in all.
        """
        if self.candidate.case.cores == self.baseline.case.cores:
            return 1.0
        pairs = [
            (ours.probes_gb_s, theirs.probes_gb_s)
            for ours, theirs in zip(self.candidate.runs, self.baseline.runs, strict=True)
        ]
        return median_of(float(np.mean(ours) / np.mean(theirs)) for ours, theirs in pairs if ours and theirs)

    @property
    def remarks(self) -> tuple[str, ...]:
        """Weaknesses of the comparison, with the remarks of both sides."""
        weaknesses = [*self.baseline.remarks, *self.candidate.remarks]
        if self.rounds < FEWEST_ROUNDS and not self.in_epochs:
            probability = 1 - 2 * 0.5**self.rounds
            weaknesses.append(
                f"{self.rounds} rounds: the interval holds the ratio with {probability:.0%} probability at most, not "
                "95%"
            )
        environment = self.candidate.environment
        if not self.candidate.taken_cores and environment.load_average > environment.cores / 2:
            weaknesses.append(f"the machine was busy before the first round (load {environment.load_average})")
        if not self.tokens_equal:
            drawn = ": sampling draws others where logits differ in their last digits" if self.case.sample else ""
            weaknesses.append(f"the sides' tokens differ from new token {self.first_difference} on{drawn}")
        trust = self.trust()
        if not trust.trustworthy:
            weaknesses.append(trust.sentence)
        if self.verdict is Verdict.UNDECIDED and trust.mended_by_rounds:
            more = more_rounds_text(self.more_rounds, self.unit)
            weaknesses.append(f"undecided after {self.rounds} {self.unit}s: {more}{_budget()}")
        if self.in_epochs and not self.placed_anew:
            weaknesses.append(
                "the weights stayed in one place, so two processes of one side may differ by "
                f"{PROCESS_LUCK:.0%}, which the interval does not show"
            )
        if self.dropped_pairs:
            weaknesses.append(f"{self.dropped_pairs} pairs of turns were dropped, because the machine slept meanwhile")
        if self.interrupted:
            weaknesses.append(f"interrupted after {self.rounds} {self.unit}s")
        return tuple(weaknesses)

    def to_frame(self) -> pd.DataFrame:
        """A row for each new token of each run of both sides, in milliseconds. The first column is the side's role,
        "baseline" or "candidate"; the others are described at `Measurement.sample_rows`.
        """
        sides = {"baseline": self.baseline, "candidate": self.candidate}
        return frame_of([{"role": role} | row for role, side in sides.items() for row in side.sample_rows()])

    def pairs_frame(self) -> pd.DataFrame:
        """A row for each pair of turns; none for a comparison in rounds. Columns: epoch and number of the pair, mean
        step of each side without its first one, their ratio, and the bandwidth probed in the pair; then for each side
        the place of its turn in the pair (the probe has a place, too), the seconds since the first epoch began, and the
        first step.
        """
        return pairs_frame(self.baseline.runs, self.candidate.runs)

    def table(self) -> ResultTable:
        """The figures of both sides, the ratios with their intervals, the verdict, and the origin of it all. A speedup
        is never shown without its interval, its baseline and its trust.
        """
        baseline, candidate = self.baseline.name, self.candidate.name
        return ResultTable(
            title=self.case.title,
            columns=("median of runs", baseline, candidate, f"{baseline} / {candidate}  [{self.confidence}]"),
            rows=tuple(
                (
                    row,
                    *(number_or_unknown(getattr(side, figure), form) for side in (self.baseline, self.candidate)),
                    str(self.ratio(metric)) if metric else "",
                )
                for row, (figure, form, metric) in FIGURES.items()
            ),
            claim=self._claim_below(),
            notes=tuple(self._notes()),
        )

    def _claim_below(self) -> Claim:
        """The verdict or the reason against one, and the ratio that decides it."""
        speed, trust = self.ratio("per_token"), self.trust()
        against = f"{self.candidate.name} against {self.baseline.name}: {speed} per token"
        if not trust.trustworthy:
            return Claim("NOT TRUSTWORTHY", "bold red", f"{against}\n{trust.sentence}")
        reaches = "a claim needs more than" if self.looks else "noise alone reaches"
        return Claim(str(speed.verdict), COLOURS[speed.verdict], f"{against}; {reaches} {1 + speed.noise:.3f}x")

    def _notes(self) -> list[str]:
        baseline, candidate, case = self.baseline, self.candidate, self.case
        looks = f", looked at after {', '.join(map(str, self.looks))}" if self.looks else ""
        tokens = "equal" if self.tokens_equal else f"DIFFERENT from new token {self.first_difference} on"
        bandwidth = self.read_bandwidth_gb_s
        limit = f"{bandwidth:.0f} GB/s read, probed around the runs" if bandwidth else "read bandwidth unknown"
        rank_notes = []
        if case.ranks > 1:
            waits = ", ".join(f"{share:.0%}" for share in candidate.communication_shares)
            most = f"at most {self.limit_ratio:.2f}x by memory" if self.limit_ratio else "limit unknown"
            stages = f" as {case.pp} stages, schedule {case.schedule}" if case.pp > 1 else ""
            base = baseline.case
            ranks = f"{base.ranks} ranks, each with" if base.ranks > 1 else "one process with"
            rank_notes.append(
                f"{candidate.name}: {case.ranks} ranks{stages}, each with {case.threads} thread(s); {baseline.name}: "
                f"{ranks} {base.threads}; {most}; the ranks wait for each other in {waits} of a decode step"
            )
        reads = [f"{side.name} read its weights with {side.reading}" for side in (baseline, candidate) if side.reading]
        hooks = [f"hooks of {side.name}: {side.kinds_replaced}" for side in (baseline, candidate) if side.replaced]
        limits = [f"the limit was set by {candidate.probe}"] if candidate.probe else []
        answers = [f"{side.name} answers: {side.answer}" for side in (baseline, candidate) if side.answer is not None]
        return [
            *([f"question: {candidate.question}", *answers] if answers else []),
            *rank_notes,
            f"tokens of both sides: {tokens} ({self.rounds} {self.unit}s{looks})",
            *([f"scatter of the ratio: {self.scatter}"] if self.scatter else []),
            *([self.tells_apart.sentence] if self.tells_apart else []),
            *([f"the ratio follows the rate of the memory: {self.by_rate}"] if self.by_rate else []),
            *([f"whole generations took turns, not a few tokens: {self.why_rounds}"] if self.why_rounds else []),
            *([str(self.shared_weights)] if self.shared_weights else []),
            f"weights: {case.origin}",
            f"{baseline.name}: {baseline.impl}; {candidate.name}: {candidate.impl}",
            *hooks,
            *[f"{side.name}: {side.expert_reads}" for side in (baseline, candidate) if side.expert_reads],
            f"machine: {candidate.environment.machine}; {limit}",
            *([f"ways to read: {'; '.join(ways)}"] if (ways := reads + limits) else []),
        ]

    def as_dict(self) -> dict[str, Any]:
        """The one object that `labkit compare --json` prints last."""
        ratios = {metric: self.ratio(metric) for metric in METRICS}
        trust = self.trust()
        return {
            **self.case.model_dump(),
            "rounds": self.rounds,
            "unit": self.unit,
            "looks": list(self.looks),
            "scatter": None if self.scatter is None else asdict(self.scatter),
            "tells_apart": None if self.tells_apart is None else asdict(self.tells_apart),
            "by_rate": None if self.by_rate is None else asdict(self.by_rate),
            "why_rounds": self.why_rounds,
            "shared_weights": None if self.shared_weights is None else self.shared_weights.model_dump(),
            "baseline": self.baseline.as_dict(),
            "candidate": self.candidate.as_dict(),
            **{f"{metric}_ratio": ratio.value for metric, ratio in ratios.items()},
            **{f"{metric}_ratio_low": ratio.low for metric, ratio in ratios.items()},
            **{f"{metric}_ratio_high": ratio.high for metric, ratio in ratios.items()},
            "noise": ratios["per_token"].noise,
            "verdict": str(self.verdict),
            "trustworthy": trust.trustworthy,
            "distrust": [doubt.why for doubt in trust.doubts],
            "remedy": trust.remedy,
            "more_rounds": self.more_rounds,
            "tokens_equal": self.tokens_equal,
            "first_difference": self.first_difference,
            "read_bandwidth_gb_s": self.read_bandwidth_gb_s,
            "limit_ratio": self.limit_ratio,
            "remarks": list(self.remarks),
            "environment": self.candidate.environment.model_dump(mode="json"),
        }


def _budget() -> str:
    """The option that buys more rounds, in brackets; empty outside of the command line."""
    return f" ({setting('budget_s')})" if on_command_line() and offered("budget_s") else ""
