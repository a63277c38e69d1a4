"""Simulated turns that consist of noise: pairs in epochs, for many comparisons at once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from labkit.statistics.sequential import hodges_lehmann

Samples = NDArray[np.float64]  # [comparison, epoch]
PAIRS = 10  # of an epoch


@dataclass(frozen=True)
class SimulatedTurns:
    """What moves the logarithm of the ratio of two equal sides."""

    pair: float  # deviation of a pair
    correlation: float = 0.0  # of neighbouring pairs
    switches: float = 0.0  # chance that memory halves or doubles its rate between the two turns of a pair
    placement: float = 0.0  # deviation between placements, with the tails of Student's t with 4 degrees of freedom
    lasting: float = 0.0  # how much of a placement stays for the next epoch, which may get the memory that was freed
    drift: float = 0.0  # deviation between the first and the last pair of an epoch

    def epochs(self, rng: np.random.Generator, comparisons: int, epochs: int, speedup: float = 1.0) -> Samples:
        """The centre of each epoch."""
        size = (comparisons, epochs, PAIRS)
        logs, fresh = rng.standard_normal(size), np.sqrt(1 - self.correlation**2)
        for index in range(1, PAIRS):
            logs[..., index] = self.correlation * logs[..., index - 1] + fresh * logs[..., index]
        logs *= self.pair
        logs += (rng.random(size) < self.switches) * rng.choice([-1, 1], size) * np.log(2) * rng.random(size)
        logs += self.drift * rng.standard_normal((comparisons, epochs, 1)) * np.linspace(-1, 1, PAIRS)
        place = rng.standard_t(4, (comparisons, epochs)) / np.sqrt(2)
        for index in range(1, epochs):
            place[:, index] = self.lasting * place[:, index - 1] + np.sqrt(1 - self.lasting**2) * place[:, index]
        return np.log(speedup) + hodges_lehmann(logs, 1.0)[0] + self.placement * place


STEADY = SimulatedTurns(pair=0.02, placement=0.01)
PLACES = SimulatedTurns(pair=0.02, placement=0.025, lasting=0.2, drift=0.02)
MODES = SimulatedTurns(pair=0.06, correlation=0.15, switches=0.05, placement=0.015)
SHARED = SimulatedTurns(pair=0.12, correlation=0.5, switches=0.1, placement=0.03, lasting=0.3, drift=0.05)
TURNS = {"steady": STEADY, "places": PLACES, "modes": MODES, "shared": SHARED}
