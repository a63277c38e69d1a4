"""Simulated machines that consist of noise: rounds of two sides, for many comparisons at once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Rounds = NDArray[np.float64]  # [comparison, round]


@dataclass(frozen=True)
class SimulatedMachine:
    """What disturbs a run, as parts of the logarithm of its time."""

    run: float = 0.0  # deviation of each run, with the tails of Student's t with 3 degrees of freedom
    mood: float = 0.0  # deviation that lasts for several runs (autocorrelation of 0.9 from run to run)
    drift: float = 0.0  # difference of the last run from the first
    bursts: float = 0.0  # chance per run of another program, which stays for 4 runs on average; up to 3 times the time
    luck: float = 0.0  # deviation of a process for its whole life

    def rounds(
        self, rng: np.random.Generator, comparisons: int, rounds: int, speedup: float = 1.0
    ) -> tuple[Rounds, Rounds]:
        """Times of baseline and candidate, which run one after the other in each round, in random order."""
        runs = 2 * rounds
        logs = self.run * rng.standard_t(3, (comparisons, runs)) / np.sqrt(3)
        logs += self.drift * np.linspace(0, 1, runs)
        mood = rng.standard_normal((comparisons, runs))
        busy = np.zeros((comparisons, runs), dtype=bool)
        starts, continues = rng.random((comparisons, runs)) < self.bursts, rng.random((comparisons, runs)) < 0.75
        for index in range(runs):
            if index:
                mood[:, index] = 0.9 * mood[:, index - 1] + np.sqrt(1 - 0.9**2) * mood[:, index]
                busy[:, index] = starts[:, index] | (busy[:, index - 1] & continues[:, index])
            else:
                busy[:, index] = starts[:, index]
        logs += self.mood * mood + busy * np.log(rng.uniform(1, 3, (comparisons, runs)))
        baseline_first = rng.random((comparisons, rounds)) < 0.5
        firsts, seconds = logs[:, 0::2], logs[:, 1::2]
        luck = self.luck * rng.standard_normal((2, comparisons, 1))
        baseline = np.where(baseline_first, firsts, seconds) + luck[0]
        candidate = np.where(baseline_first, seconds, firsts) + luck[1]
        return 30 * np.exp(baseline), 30 / speedup * np.exp(candidate)


QUIET = SimulatedMachine(run=0.01, mood=0.01, luck=0.005)
MODERATE = SimulatedMachine(run=0.05, mood=0.05, drift=0.05, luck=0.005)
SHARED = SimulatedMachine(run=0.05, mood=0.10, drift=-0.3, bursts=0.02, luck=0.005)
BUSY = SimulatedMachine(run=0.15, mood=0.3, drift=0.5, bursts=0.10, luck=0.005)
MACHINES = {"quiet": QUIET, "moderate": MODERATE, "shared": SHARED, "busy": BUSY}
