"""Two captures of the same work, with controls: stage by stage, on one time axis, and the difference explained."""

from __future__ import annotations

from typing import Any

from labkit.figures.captures import captures_table
from labkit.figures.difference import difference_figure, difference_table, stage_difference_table
from labkit.figures.stage_table import stage_table_figure
from labkit.figures.timeline import timeline
from labkit.harness.compare.sides import IN_PROCESS
from labkit.studies.outcome import Outcome
from labkit.studies.traces import SOURCES, CapturePair, bundled_pair, capture_pair
from labkit.system.partly import Show
from labkit.system.progress import Progress
from labkit.widgets.bench import Bench
from labkit.widgets.timeline import Timeline

STEPS_SHOWN = 2  # decode steps on which the timelines open


class TraceBench(Bench[CapturePair]):
    """Runs `labkit.studies.traces.capture_pair`."""

    kind = CapturePair

    def __init__(
        self,
        *,
        model: str,
        baseline: str = "hf-eager",
        candidate: str = "fused",
        steps: int = 16,
        source: str = "auto",
        threads: int = 0,
    ) -> None:
        """Takes the settings of `capture_pair`.

        - model: a preset, a checkpoint folder or a hub id.
        - baseline, candidate: the sides.
        - steps: decode steps of each side.
        - source: nsys, torch (torch.profiler), bundled (captures that come with labkit), or auto.
        - threads: 0: one for each core.
        """
        sides = {"model": model, "baseline": baseline, "candidate": candidate}
        settings: dict[str, Any] = sides | {"steps": steps, "source": source, "threads": threads}
        if source == "bundled":
            settings |= bundled_pair().of
        choices = {"baseline": IN_PROCESS, "candidate": IN_PROCESS, "source": SOURCES}
        super().__init__(settings, choices)

    def measure(self, settings: dict[str, Any], follow: Progress, show: Show) -> CapturePair:
        return capture_pair(
            settings["model"],
            settings["baseline"],
            settings["candidate"],
            steps=settings["steps"],
            source=settings["source"],
            threads=settings["threads"] or None,
            progress=follow,
            show=show,
        )

    def headline(self, result: CapturePair) -> str:
        return result.headline

    def outcome(self, result: CapturePair) -> Outcome:
        return result.outcome

    def captures(self) -> None:
        """Shows the profiler, the run, the machine and the profiling tax of both captures."""
        self.view(captures_table)

    def stages(self) -> None:
        """Shows the time of a decode step, stage by stage, for both sides."""
        self.view(lambda pair: stage_table_figure(pair.tables[0], name=pair.names[0]))
        self.view(lambda pair: stage_table_figure(pair.tables[1], name=pair.names[1]))

    def timelines(self) -> None:
        """Shows both sides below each other on one time axis: a widget live, a figure in a batch run."""
        draw = Timeline if self._controls else timeline
        self.view(lambda pair: draw(pair.named_traces, steps=min(STEPS_SHOWN, pair.decode_steps)))

    def difference(self) -> None:
        """Shows the difference of a step as a waterfall and in words."""
        self.view(lambda pair: difference_figure(pair.difference))
        self.view(lambda pair: difference_table(pair.difference))
        self.view(lambda pair: stage_difference_table(pair.difference))
