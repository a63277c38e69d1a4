"""Two captures of the same work under controls: stage by stage, on one time axis, and the difference explained."""

from __future__ import annotations

from typing import Any

from labkit.figures.captures import captures_table
from labkit.figures.difference import difference_figure, difference_table, stage_difference_table
from labkit.figures.stage_table import stage_table_figure
from labkit.figures.timeline import timeline
from labkit.harness.compare.baselines import BASELINES
from labkit.studies.outcome import Outcome
from labkit.studies.traces import SOURCES, CapturePair, bundled_pair, capture_pair
from labkit.system.partly import Show
from labkit.system.progress import Progress
from labkit.widgets.bench import Bench
from labkit.widgets.timeline import Timeline

STEPS_SHOWN = 2  # of the timelines, to begin with


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
        """`threads` 0: one for each core."""
        sides = {"model": model, "baseline": baseline, "candidate": candidate}
        settings: dict[str, Any] = sides | {"steps": steps, "source": source, "threads": threads}
        if source == "bundled":
            settings |= bundled_pair().of
        choices = {"baseline": BASELINES, "candidate": BASELINES, "source": SOURCES}
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

    def headline(self, found: CapturePair) -> str:
        return found.headline

    def outcome(self, found: CapturePair) -> Outcome:
        return found.outcome

    def captures(self) -> None:
        """The two captures: by which profiler, of what run, on which machine, and at what cost."""
        self.view(captures_table)

    def stages(self) -> None:
        """Where the time of a decode step goes, on either side."""
        self.view(lambda found: stage_table_figure(found.tables[0], name=found.names[0]))
        self.view(lambda found: stage_table_figure(found.tables[1], name=found.names[1]))

    def timelines(self) -> None:
        """Both sides under each other on one time axis: a widget in a live notebook, a figure in a batch run."""
        draw = Timeline if self._controls else timeline
        self.view(lambda found: draw(found.named_traces, steps=min(STEPS_SHOWN, found.decode_steps)))

    def difference(self) -> None:
        """The difference of a step, as a waterfall and in words."""
        self.view(lambda found: difference_figure(found.difference))
        self.view(lambda found: difference_table(found.difference))
        self.view(lambda found: stage_difference_table(found.difference))
