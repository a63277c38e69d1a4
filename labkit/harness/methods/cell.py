"""Record of one method on one batch size: its measurement, or the reason for not having one."""

from __future__ import annotations

from typing import Any, Literal, Self

import numpy as np
from pydantic import model_validator

from labkit.harness.environment import Environment
from labkit.harness.frozen_record import ResultRecord
from labkit.harness.records import Measurement
from labkit.harness.runs import Case
from labkit.statistics import Ratio, Trust, grade
from labkit.statistics.ratios import median_ratio
from labkit.statistics.sequential import rule_of_epochs, typical_time
from labkit.statistics.trust import busy


class MethodCell(ResultRecord):
    """A method on a case. Exactly one of `measured`, `oom` and `refused` is set.

    A method that can pause is measured in epochs: turns of a few tokens, each with a probe of the memory next to it,
    and new memory for the weights between two epochs. The time of a call is then the first token and the steps after it
    at the epoch's time per token. Older records, cells with limited memory and methods that cannot pause have rounds of
    whole calls.
    """

    kind: Literal["method_cell"] = "method_cell"
    method: str  # its name on the command line
    case: Case
    cycles: int  # epochs, or timed calls after one that is not timed
    seed: int  # of random weights and prompts
    environment: Environment
    measured: Measurement | None = None
    oom: str = ""  # message of a method that ran out of memory
    refused: str = ""  # why the method cannot run the case, or failed
    dropped_pairs: int = 0  # of turns and probes, because the clock of the machine jumped
    why_rounds: str = ""  # why whole calls were timed; empty: epochs, no measurement, or an older record

    @model_validator(mode="after")
    def _one_outcome(self) -> Self:
        if bool(self.measured) + bool(self.oom) + bool(self.refused) != 1:
            raise ValueError("expected one of measured, oom and refused")
        return self

    @property
    def final(self) -> bool:
        """Whether the cell need not be measured again. A refused method may run after an installation, and a disturbed
        measurement can be repeated on a quiet machine.
        """
        return not self.refused and not self.disturbed

    @property
    def disturbed(self) -> bool:
        """Whether other programs took processors during the measurement."""
        return self.measured is not None and busy(self.measured.taken_cores)

    @property
    def unit(self) -> str:
        """The word for what `cycles` counts."""
        return "epoch" if self.measured is not None and self.measured.in_epochs else "round"

    @property
    def call_ms(self) -> float | None:
        """Time of the whole call, prompts included: the centre of the epochs, or the median of the rounds."""
        typical = self._typical
        return None if typical is None else typical[0]

    @property
    def interval(self) -> Ratio | None:
        """The 95 % interval of the time of a call, relative to that time: a ratio of 1 with its interval. It comes from
        the scatter between epochs, or from drawing rounds.
        """
        typical = self._typical
        return None if typical is None else typical[1]

    @property
    def _typical(self) -> tuple[float, Ratio] | None:
        if self.measured is None:
            return None
        calls_ms = self.measured.rounds_ms("end_to_end")
        if self.unit == "round":
            return float(np.median(calls_ms)), median_ratio(calls_ms)
        return typical_time(calls_ms, rule_of_epochs(self.measured.placed_anew))

    @property
    def trust(self) -> Trust:
        """Whether to believe the time; a cell without one has no doubts."""
        measured, interval = self.measured, self.interval
        if measured is None or interval is None:
            return Trust()
        shares = [share for share in (measured.share_of_limit,) if share is not None]
        return grade(interval, len(measured.runs), taken_cores=measured.taken_cores, shares=shares, unit=self.unit)

    @property
    def place(self) -> tuple[str, int]:
        """Row and column of the cell in the table."""
        return self.method, self.case.batch

    @property
    def step_ms(self) -> float | None:
        """Time of the whole call / new tokens of a sequence."""
        return None if self.call_ms is None else self.call_ms / self.case.new_tokens

    @property
    def token_ms(self) -> float | None:
        """Time of the whole call / new tokens of the whole batch: the articles' time per token."""
        return None if self.step_ms is None else self.step_ms / self.case.batch

    @property
    def tokens_per_s(self) -> float | None:
        return None if self.token_ms is None else 1e3 / self.token_ms

    @property
    def why(self) -> str:
        """Why there is no measurement; empty where there is one."""
        return self.oom or self.refused

    def as_dict(self) -> dict[str, Any]:
        """Figures of the cell, as in `labkit bench-methods --json` and in frames."""
        measured, interval, token_ms = self.measured, self.interval, self.token_ms
        return {
            "method": self.method,
            "impl": measured.impl if measured else None,
            "weights": measured.weights if measured else None,
            **self.case.model_dump(),
            "outcome": "measured" if measured else "oom" if self.oom else "refused",
            "unit": self.unit if measured else None,
            "cycles": len(measured.runs) if measured else None,
            "why_rounds": self.why_rounds,
            "step_ms": self.step_ms,
            "token_ms": token_ms,
            "token_ms_low": interval and token_ms and token_ms * interval.low,
            "token_ms_high": interval and token_ms and token_ms * interval.high,
            "trustworthy": self.trust.trustworthy if measured else None,
            "distrust": [doubt.why for doubt in self.trust.doubts],
            "taken_cores": float(np.median(measured.taken_cores)) if measured and measured.taken_cores else None,
            "tokens_per_s": self.tokens_per_s,
            "floor_share": measured.floor_share if measured else None,
            "start_to_ready_s": measured.start_to_ready_s if measured else None,
            "peak_rss_mb": measured.peak_rss_mb if measured else None,
            "memory_limit": measured.memory_limit if measured else None,
            "streamed_mb": measured.streamed_mb if measured else None,
            "disk_gb_s": measured.disk_gb_s if measured else None,
            "why": self.why,
        }
