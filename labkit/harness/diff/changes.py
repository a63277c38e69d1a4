"""Record of the cases that became faster or slower between two times, with its table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from labkit.harness.comparison import COLOURS
from labkit.harness.diff.timed import CaseWords, TimedSide
from labkit.harness.records import METRICS
from labkit.statistics import Ratio, Trust, Verdict
from labkit.statistics.sequential import PROCESS_LUCK
from labkit.statistics.two_times import CommonRates
from labkit.system.result_table import Claim, ResultTable, Tabular, frame_of

if TYPE_CHECKING:
    import pandas as pd

METRIC_WORDS = dict(zip(METRICS, ("first token", "time per token", "end to end"), strict=True))
ORDER = (Verdict.SLOWER, Verdict.UNDECIDED, Verdict.SAME, Verdict.FASTER)


@dataclass(frozen=True)
class Change:
    """One side of one case at two times."""

    before: TimedSide
    after: TimedSide
    ratio: Ratio  # before / after: above 1 means faster
    trust: Trust
    figures: tuple[float, float]  # typical times before and after, in the sides' unit; at the common rates where known
    scatter: tuple[float, float] | None = None  # of epochs before and after, at the common rates; None: both in rounds
    common: CommonRates | None = None  # rates of the turns that were compared; None: all turns, or rounds

    @property
    def verdict(self) -> Verdict:
        """Verdict on the ratio; UNDECIDED also where the ratio is not trustworthy."""
        return self.trust.verdict(self.ratio.verdict)

    def as_dict(self) -> dict[str, Any]:
        """A case of `labkit diff --json`."""
        return {
            **dict(self.after.words),
            "unit": self.after.unit,
            "before": self.figures[0],
            "after": self.figures[1],
            "ratio": self.ratio.value,
            "ratio_low": self.ratio.low,
            "ratio_high": self.ratio.high if math.isfinite(self.ratio.high) else None,
            "noise": self.ratio.noise,
            "rounds": [len(self.before.rounds), len(self.after.rounds)],
            "samples": [self.before.sample, self.after.sample],
            "scatter_before": _known(self.scatter and self.scatter[0]),
            "scatter_after": _known(self.scatter and self.scatter[1]),
            "at_gb_s": [] if self.common is None else [list(ends) for ends in self.common.ranges_gb_s],
            "turns_used": None if self.common is None else self.common.used,
            "verdict": str(self.verdict),
            "distrust": [doubt.why for doubt in self.trust.doubts],
            "remedy": self.trust.remedy,
        }

    @property
    def basis(self) -> str:
        """The samples that the ratio comes from, in words; empty where both times have rounds."""
        if self.scatter is None:
            return ""
        times = {"before": self.before, "after": self.after}
        in_rounds = [
            f"whole generations {time} ({PROCESS_LUCK:.0%} for their one place)"
            for time in times
            if not times[time].epochs
        ]
        scatter = [
            f"± {deviation:.1%} {time}"
            for (time, side), deviation in zip(times.items(), self.scatter, strict=True)
            if side.epochs and not math.isnan(deviation)
        ]
        in_epochs = [side for side in times.values() if side.epochs]
        at_one_rate = self.common is not None or not any(
            epoch.rates_gb_s for side in in_epochs for epoch in side.epochs
        )
        between = "placements" if at_one_rate and all(side.placed_anew for side in in_epochs) else "epochs"
        spread = [f"between {between} {', '.join(scatter)}"] if scatter else []
        return "; ".join([*([str(self.common)] if self.common else []), *spread, *in_rounds])


@dataclass(frozen=True, repr=False)
class RecordsDiff(Tabular):
    """The cases that two sets of records share, and the cases of only one set."""

    before: str
    after: str
    metric: str
    tolerance: float
    changes: tuple[Change, ...]
    only_before: tuple[CaseWords, ...]
    only_after: tuple[CaseWords, ...]
    environment: tuple[str, ...]  # differences of machine and software, in words
    remarks: tuple[str, ...] = ()  # records that were left out

    def of(self, verdict: Verdict) -> tuple[Change, ...]:
        """The changes with this verdict."""
        return tuple(change for change in self.changes if change.verdict is verdict)

    @property
    def shared(self) -> CaseWords:
        """Words that all cases share, for the head of their list."""
        first, *rest = self._all
        return tuple(word for word in first if all(word in words for words in rest)) if rest else first[:-1]

    def name(self, words: CaseWords) -> str:
        """Words that distinguish a case from the others."""
        shared = set(self.shared)
        return ", ".join(text for field, text in words if (field, text) not in shared)

    def to_frame(self) -> pd.DataFrame:
        """A row for each case, with the fields of `Change.as_dict`; the doubts are one text."""
        rows = [change.as_dict() for change in self.changes]
        lists = ["rounds", "samples", "at_gb_s"]
        return frame_of([row | {"distrust": "; ".join(row["distrust"])} for row in rows]).drop(columns=lists)

    def table(self) -> ResultTable:
        """The cases with their verdicts; then the doubts, the cases without a counterpart, and other differences."""
        shared = ", ".join(text for _, text in self.shared)
        return ResultTable(
            title=f"{METRIC_WORDS[self.metric]}: {shared}" if shared else METRIC_WORDS[self.metric],
            columns=("case", "before", "after", "before / after  [95%]", "verdict"),
            rows=tuple(
                (
                    self.name(change.after.words),
                    *(_figure(figure, change.after.unit) for figure in change.figures),
                    str(change.ratio),
                    str(change.verdict),
                )
                for change in self.changes
            ),
            claim=self._claim(),
            notes=tuple(self._notes()),
            styles={str(verdict): style for verdict, style in COLOURS.items()},
        )

    def as_dict(self) -> dict[str, Any]:
        """The one object that `labkit diff --json` prints."""
        return {
            "before": self.before,
            "after": self.after,
            "metric": self.metric,
            "tolerance": self.tolerance,
            "cases": [change.as_dict() for change in self.changes],
            "verdicts": {str(verdict): len(self.of(verdict)) for verdict in ORDER},
            "only_before": [dict(words) for words in self.only_before],
            "only_after": [dict(words) for words in self.only_after],
            "environment": list(self.environment),
            "remarks": list(self.remarks),
        }

    @property
    def _all(self) -> list[CaseWords]:
        return [*(change.after.words for change in self.changes), *self.only_before, *self.only_after]

    def _claim(self) -> Claim:
        counts = ", ".join(f"{len(self.of(verdict))} {verdict}" for verdict in ORDER[1:])
        slower = len(self.of(Verdict.SLOWER))
        style = "bold red" if slower else "bold"
        rest = f"{counts} of {len(self.changes)}; a change counts from {self.tolerance:.0%} on"
        return Claim(f"{slower} {Verdict.SLOWER}", style, rest)

    def _notes(self) -> list[str]:
        doubted = [change for change in self.changes if not change.trust.trustworthy]
        remedies = dict.fromkeys(part for change in doubted for part in change.trust.remedies)
        in_rounds = any(not side.epochs for change in self.changes for side in (change.before, change.after))
        floor = f"{PROCESS_LUCK:.0%} and the noise of the rounds: two processes of one side differ as much"
        return [
            *(f"{self.name(change.after.words)}: {change.basis}" for change in self.changes if change.basis),
            *(
                [f"in rounds a change counts only beyond {floor}"]
                if in_rounds and self.tolerance < PROCESS_LUCK
                else []
            ),
            *(f"not trustworthy: {self.name(change.after.words)}: {change.trust.why}" for change in doubted),
            *([f"to mend it: {'; '.join(remedies)}"] if doubted else []),
            *(f"only in {self.before}: {text}" for text in self._by_case(self.only_before)),
            *(f"only in {self.after}: {text}" for text in self._by_case(self.only_after)),
            *(f"differs: {difference}" for difference in self.environment),
            *self.remarks,
        ]

    def _by_case(self, sides: Sequence[CaseWords]) -> list[str]:
        """The sides as one text, grouped by case; no text without sides."""
        cases: dict[str, list[str]] = {}
        for words in sides:
            cases.setdefault(self.name(words[:-1]), []).append(words[-1][1])
        return ["; ".join(f"{case}: {', '.join(names)}" for case, names in cases.items())] if cases else []


def _figure(figure: float, unit: str) -> str:
    return f"{f'{figure:#.4g}'.rstrip('.')} {unit}"


def _known(figure: float | None) -> float | None:
    return None if figure is None or math.isnan(figure) else figure
