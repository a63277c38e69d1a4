"""Sums of the stage times of one-call steps, by phase, layer and stage."""

from dataclasses import dataclass

import numpy as np

from labkit.kernels.decode_step import LAYER_STAGES, layer_times, no_times
from labkit.stages import Phase, Stage


@dataclass(frozen=True)
class StageTime:
    """Wall time of one stage of one layer, summed over `calls` steps."""

    phase: Phase
    stage: Stage
    layer: int | None  # None: outside the layers
    calls: int
    total_ms: float


@dataclass(frozen=True)
class ExpertsRead:
    """The experts that the steps of a phase read, in each layer on average over `calls` steps."""

    phase: Phase
    calls: int
    by_layer: tuple[float, ...]


class StageClock:
    """Totals since the last reset. Adding one step's times takes microseconds."""

    def __init__(self, num_layers: int, stages: tuple[Stage, ...]) -> None:
        """stages: of a layer, in running order. The times of a stage that occurs twice are added up."""
        self.num_layers, self.stages = num_layers, tuple(dict.fromkeys(stages))
        self.reset()

    def reset(self) -> None:
        self._total_ns = {phase: no_times(self.num_layers) for phase in Phase}
        self._calls = dict.fromkeys(Phase, 0)
        self._head_calls = dict.fromkeys(Phase, 0)
        self._experts_read = {phase: np.zeros(self.num_layers, dtype=np.int64) for phase in Phase}

    def add(self, phase: Phase, times_ns: np.ndarray, experts_read: np.ndarray, *, head: bool, steps: int = 1) -> None:
        """Adds the sum of some steps. times_ns, experts_read: as in `DecodeStep`."""
        self._total_ns[phase] += times_ns
        self._experts_read[phase] += experts_read
        self._calls[phase] += steps
        self._head_calls[phase] += steps * head

    def chose(self, phase: Phase, ns: int) -> None:
        """Adds time in which the results of a step were used: the choice of tokens, and a streamer's work."""
        self._total_ns[phase][-1] += ns

    def experts_read(self) -> list[ExpertsRead]:
        """Returns one record per phase that ran; none for a model without mixtures."""
        return [
            ExpertsRead(phase, calls, tuple((read / calls).tolist()))
            for phase, read in self._experts_read.items()
            if (calls := self._calls[phase]) and read.any()
        ]

    def times(self) -> list[StageTime]:
        """Returns one record per phase that ran, layer and stage, in the order of execution."""
        records = []
        for phase, total_ns in self._total_ns.items():
            if not (calls := self._calls[phase]):
                continue
            ms = total_ns / 1e6
            records.append(StageTime(phase, Stage.EMBED, None, calls, float(ms[0])))
            for layer, spans in enumerate(layer_times(ms)):
                totals = dict(zip(LAYER_STAGES, spans.tolist(), strict=True))
                records += [StageTime(phase, stage, layer, calls, totals[stage]) for stage in self.stages]
            records.append(StageTime(phase, Stage.LM_HEAD, None, self._head_calls[phase], float(ms[-2])))
            if ms[-1]:
                records.append(StageTime(phase, Stage.SAMPLE, None, self._head_calls[phase], float(ms[-1])))
        return records
