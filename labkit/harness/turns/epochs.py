"""Turns of a few tokens, in epochs: the way in which sides that can pause are compared.

All sides are in the middle of a generation, and one at a time makes a few steps. So the sides of a pair meet the same
memory, whose rate changes within seconds on a shared machine. The read bandwidth is probed in a turn of its own.

Between epochs every side puts its weights into new memory, since their place alone makes a step 1 to 3 % faster or
slower, for as long as they stay there. The centre of an epoch's pairs is one sample.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from time import monotonic, time
from typing import Any

import numpy as np

from labkit.harness.compare.loaded_side import comparison_device
from labkit.harness.compare.measured_side import MeasuredSide
from labkit.harness.compare.sampling import Sampling, Turns
from labkit.harness.compare.weight_sharing import WeightSharing
from labkit.harness.quiet import disturbance
from labkit.harness.roofline import Rates, probe_turn, rates_of_epoch
from labkit.harness.runs import Run, TokenTurn
from labkit.harness.turns.looks import FEWEST_PAIRS, FEWEST_STEPS, epoch_goes_on, next_steps, usual_steps
from labkit.harness.turns.placing import place_probe_anew
from labkit.statistics.resolution import TellsApart
from labkit.statistics.sequential import EPOCHS

JUMP_S = 0.5  # by which the clock of the day may move against the monotonic one in a pair
LEAST_PROMPTS = 6  # then a generation goes on in the next epoch, since first tokens have enough samples
PROBE = -1  # the probe's index among the sides


def why_not(sides: Sequence[MeasuredSide], new_tokens: int, memory_gb: float | None) -> str:
    """Why these sides cannot take turns of a few tokens; empty if they can."""
    if memory_gb is not None:
        return "with limited memory the files of a side are made cold before each generation"
    if new_tokens <= FEWEST_STEPS - 1:
        return f"{new_tokens} new tokens leave no step beside the first one of a turn"
    stuck = [side.name for side in sides if not side.pauses]
    return f"{', '.join(stuck)} cannot pause between two tokens" if stuck else ""


@dataclass
class _SideEpoch:
    """Measurements of one side in the present epoch."""

    goes_on: bool  # whether it begins in the middle of the previous epoch's generation
    turns: list[TokenTurn] = field(default_factory=list)
    prompts_ms: list[float] = field(default_factory=list)
    decode_ms: list[float] = field(default_factory=list)
    generations: list[list[list[int]]] = field(default_factory=list)  # [generation][step, sequence]

    def __post_init__(self) -> None:
        if self.goes_on:
            self.generations.append([])

    def note_rates(self, rates: Sequence[float | None]) -> None:
        """Notes the read bandwidth of each pair."""
        self.turns = [
            turn.model_copy(update={"bandwidth_gb_s": rate}) for turn, rate in zip(self.turns, rates, strict=True)
        ]


def _runs(epochs: Sequence[_SideEpoch], new_tokens: int) -> Iterator[Run]:
    """The record of each epoch. One without a prompt has the first token of the epoch before."""
    first_ms = 0.0
    for index, epoch in enumerate(epochs):
        first_ms = float(np.median(epoch.prompts_ms)) if epoch.prompts_ms else first_ms
        yield Run.of_epoch(
            epoch.turns,
            round=index,
            first_ms=first_ms,
            prompts_ms=epoch.prompts_ms,
            decode_ms=epoch.decode_ms,
            new_tokens=new_tokens,
        )


def _tokens(epochs: Sequence[_SideEpoch]) -> list[list[list[int]]]:
    """[generation][sequence, position]."""
    generations: list[list[list[int]]] = []
    for epoch in epochs:
        first, *more = epoch.generations
        if epoch.goes_on:
            generations[-1] = generations[-1] + first
        else:
            generations.append(first)
        generations += more
    return [np.array(steps).T.tolist() for steps in generations]


class Epochs(Sampling):
    """An epoch has up to `MOST_PAIRS` pairs of turns, one of each side, in random order and with a probe."""

    rule = EPOCHS

    def __init__(
        self,
        *arguments: Any,
        new_tokens: int,
        tells_apart: TellsApart | None = None,
        show: Callable[[Turns], None] | None = None,
        sharing: WeightSharing | None = None,
    ) -> None:
        """`arguments`: as for `Sampling`. `new_tokens`: of a whole generation, at least 3. `tells_apart`: the smallest
        difference that counts between sides with weights in different places. `show`: gets the epochs so far, between
        two of them, once they are enough for a look. `sharing`: places the weights of all sides in each epoch; None:
        each side places its own.
        """
        super().__init__(*arguments)
        self._sharing = sharing
        self._new, self._tells_apart, self._show = new_tokens, tells_apart, show
        self._random = np.random.default_rng(self._schedule.seed)
        self._device = comparison_device()
        self._epochs: list[list[_SideEpoch]] = []  # that are complete, by side
        self._probes: dict[int, list[Rates]] = {}  # of each pair of the present epoch, by number of threads
        self._prompts = 0  # begun so far
        self._left = 0  # steps of the present generation that are still to come
        self._steps_per_turn = 0  # not known yet
        self._dropped = 0
        self._interrupted = False

    def run(self) -> None:
        self._started = monotonic()
        self._interrupted = self._looks.collect(
            self._epochs, self._epoch, lambda: self._is_over(len(self._epochs), self._started), self._after_epoch
        )
        self._others.end()

    def _after_epoch(self) -> None:
        if self._show and len(self._epochs) >= self.rule.first_look:
            self._show(self.result())

    def result(self) -> Turns:
        for index, side in enumerate(self.sides):
            measured = [epoch[index] for epoch in self._epochs]
            side.note_epochs(list(_runs(measured, self._new)), _tokens(measured))
        shared = None if self._sharing is None else self._sharing.record
        return Turns(
            **self._measurements(),
            dropped_pairs=self._dropped,
            interrupted=self._interrupted,
            shared_weights=shared,
            tells_apart=None if shared is not None and shared.mostly else self._tells_apart,
        )

    def _label(self) -> str:
        """The number of the epoch, the ratio so far where there are two sides, and what disturbs the measurement."""
        done = len(self._epochs)
        label = self._schedule.numbered("epoch", done + 1, self.rule)
        if done >= self.rule.first_look and len(self.sides) == 2:
            (comparison,) = self.result().with_last
            label += f": {comparison.so_far}"
        needed = max(side.spec.cores for side in self.sides) if self._device.type == "cpu" else 1
        others = disturbance(self._others.cores[-1], needed) if self._others.cores else ""
        return f"{label}; {others}" if others else label

    def _epoch(self) -> list[_SideEpoch]:
        """One epoch of all sides."""
        self._steps.begin(self._label(), len(self.sides))
        self._place()
        if self._prompts < LEAST_PROMPTS or not all(side.pauses_to_move for side in self.sides):
            self._left = 0
        epoch = [_SideEpoch(goes_on=self._left > 0) for _ in self.sides]
        if not self._left:
            self._begin(epoch)
        self._probes = {side.spec.cores: [] for side in self.sides}
        started, pairs = monotonic(), 0
        while self._goes_on(pairs, started):
            if not self._left:
                self._begin(epoch)
            if not self._steps_per_turn:
                self._find_steps_per_turn(epoch)
                continue
            pairs += self._pair(epoch, pairs, next_steps(self._left, self._steps_per_turn))
        self._others.end_round()
        for side, of_side in zip(self.sides, epoch, strict=True):
            of_side.note_rates(rates_of_epoch(self._probes[side.spec.cores], side.spec.cores))
        return epoch

    def _goes_on(self, pairs: int, started: float) -> bool:
        """Whether an epoch goes on."""
        if self._schedule.whole:
            return self._left > 0 or pairs < FEWEST_PAIRS
        return epoch_goes_on(pairs, started)

    def _place(self) -> None:
        place_sides = [side.place for side in self.sides] if self._sharing is None else [self._sharing.place]
        with ThreadPoolExecutor(1 + len(place_sides)) as pool:
            list(pool.map(lambda place: place(), (*place_sides, place_probe_anew)))

    def _begin(self, epoch: list[_SideEpoch]) -> None:
        """Begins the next prompt on every side, in random order."""
        self._prompts += 1
        for index in self._random.permutation(len(self.sides)):
            first_ms, tokens = self.sides[index].begin(self._schedule.seed + self._prompts)
            epoch[index].prompts_ms.append(first_ms)
            epoch[index].generations.append(tokens)
        self._left = self._new - 1

    def _find_steps_per_turn(self, epoch: list[_SideEpoch]) -> None:
        """Sets the steps of a turn, the same for all sides, from a turn that does not count."""
        tried = FEWEST_STEPS if self._new - 1 >= 2 * FEWEST_STEPS else self._new - 1
        fastest_ms = math.inf
        for index, side in enumerate(self.sides):
            steps_ms, tokens = side.turn(tried)
            epoch[index].generations[-1] += tokens
            fastest_ms = min(fastest_ms, *steps_ms[1:])
        self._steps_per_turn = usual_steps(fastest_ms)
        self._left -= tried

    def _pair(self, epoch: list[_SideEpoch], pair: int, steps: int) -> bool:
        """A turn of each side and of the probe, in random order. False if it was dropped."""
        further_tokens = self._new / 2 - self._left + steps / 2
        self._left -= steps
        clock_offset, taken = time() - monotonic(), {}
        rates: dict[int, Rates] = {}
        order = self._random.permutation(len(self.sides) + 1) + PROBE
        for place, index in enumerate(order):
            if index == PROBE:
                rates = {cores: probe_turn(cores, self._device) for cores in self._probes}
                continue
            at_s = monotonic() - self._started
            steps_ms, tokens = self.sides[index].turn(steps)
            epoch[index].generations[-1] += tokens
            taken[index] = place, at_s, steps_ms
        if abs(time() - monotonic() - clock_offset) > JUMP_S:
            self._dropped += 1
            return False
        for cores, probes in self._probes.items():
            probes.append(rates[cores])
        for index, (place, at_s, (first_ms, *steps_ms)) in taken.items():
            epoch[index].decode_ms += steps_ms
            epoch[index].turns.append(
                TokenTurn(
                    pair=pair,
                    place=place,
                    at_s=round(at_s, 3),
                    first_step_ms=first_ms,
                    step_ms=float(np.median(steps_ms)),
                    further_tokens=further_tokens,
                )
            )
        return True
