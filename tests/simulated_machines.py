"""Machines that exist as noise only: rounds of two sides, many comparisons at once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Rounds = NDArray[np.float64]  # [comparison, round]


@dataclass(frozen=True)
class SimulatedMachine:
    """What disturbs a run, as parts of the logarithm of its time.

    `run`: the deviation of each run by itself, with the tails of Student's t with 3 degrees of freedom. `mood`: the
    deviation of what lasts for several runs (an autocorrelation of 0.9 from run to run). `drift`: how much the last run
    differs from the first. `bursts`: how often another program comes for 4 runs on average, each then taking up to
    three times as long. `luck`: the deviation of what a process keeps for as long as it lives.
    """

    run: float = 0.0
    mood: float = 0.0
    drift: float = 0.0
    bursts: float = 0.0
    luck: float = 0.0

    def rounds(
        self, rng: np.random.Generator, comparisons: int, rounds: int, speedup: float = 1.0
    ) -> tuple[Rounds, Rounds]:
        """Baseline and candidate, which run one after the other in each round, in random order."""
        runs = 2 * rounds
        logs = self.run * rng.standard_t(3, (comparisons, runs)) / np.sqrt(3)
        logs += self.drift * np.linspace(0, 1, runs)
        mood = rng.standard_normal((comparisons, runs))
        busy = np.zeros((comparisons, runs), dtype=bool)
        come, stay = rng.random((comparisons, runs)) < self.bursts, rng.random((comparisons, runs)) < 0.75
        for at in range(runs):
            if at:
                mood[:, at] = 0.9 * mood[:, at - 1] + np.sqrt(1 - 0.9**2) * mood[:, at]
                busy[:, at] = come[:, at] | (busy[:, at - 1] & stay[:, at])
            else:
                busy[:, at] = come[:, at]
        logs += self.mood * mood + busy * np.log(rng.uniform(1, 3, (comparisons, runs)))
        first = rng.random((comparisons, rounds)) < 0.5
        one, other = logs[:, 0::2], logs[:, 1::2]
        luck = self.luck * rng.standard_normal((2, comparisons, 1))
        baseline = np.where(first, one, other) + luck[0]
        candidate = np.where(first, other, one) + luck[1]
        return 30 * np.exp(baseline), 30 / speedup * np.exp(candidate)


QUIET = SimulatedMachine(run=0.01, mood=0.01, luck=0.005)
MODERATE = SimulatedMachine(run=0.05, mood=0.05, drift=0.05, luck=0.005)
SHARED = SimulatedMachine(run=0.05, mood=0.10, drift=-0.3, bursts=0.02, luck=0.005)
BUSY = SimulatedMachine(run=0.15, mood=0.3, drift=0.5, bursts=0.10, luck=0.005)
MACHINES = {"quiet": QUIET, "moderate": MODERATE, "shared": SHARED, "busy": BUSY}
