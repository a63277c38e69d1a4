"""Schedules of a pipeline, with controls for the settings."""

from __future__ import annotations

from typing import Any

from labkit.models.dtypes import FLOAT_DTYPES
from labkit.studies.outcome import Outcome
from labkit.studies.pipeline import (
    ALL_SCHEDULES,
    PipelineStudy,
    parse_parts,
    parse_schedules,
    study_pipeline,
)
from labkit.system.partly import Show
from labkit.system.progress import Progress
from labkit.widgets.bench import Bench


class PipelineBench(Bench[PipelineStudy]):
    """Runs `study_pipeline`."""

    kind = PipelineStudy

    def __init__(
        self,
        *,
        model: str,
        dtype: str = "float32",
        stages: int = 2,
        batch: int = 32,
        prompt_tokens: int = 16,
        new_tokens: int = 16,
        schedules: str = ALL_SCHEDULES,
        micro_batches: str = "2, 4, 8",
        rounds: int = 3,
        threads: int = 0,
    ) -> None:
        """Takes the settings of `study_pipeline`.

        - model: a preset, a checkpoint folder or a hub id.
        - dtype: type of weights and activations.
        - stages: ranks that each have some of the layers.
        - batch: sequences in a batch.
        - prompt_tokens: tokens of each prompt.
        - new_tokens: tokens to generate.
        - schedules: some of queue, rounds, barrier and naive, separated by commas.
        - micro_batches: numbers of micro-batches, separated by commas.
        - rounds: runs of each schedule and number of micro-batches.
        - threads: of each rank; 0: the cores are divided among the stages.
        """
        texts = {"model": model, "dtype": dtype, "schedules": schedules, "micro_batches": micro_batches}
        sizes = {"stages": stages, "batch": batch, "prompt_tokens": prompt_tokens, "new_tokens": new_tokens}
        checks = {"schedules": parse_schedules, "micro_batches": parse_parts}
        super().__init__(texts | sizes | {"rounds": rounds, "threads": threads}, {"dtype": FLOAT_DTYPES}, checks)

    def measure(self, settings: dict[str, Any], follow: Progress, show: Show) -> PipelineStudy:
        return study_pipeline(
            settings["model"],
            dtype=settings["dtype"],
            stages=settings["stages"],
            batch=settings["batch"],
            prompt=settings["prompt_tokens"],
            new=settings["new_tokens"],
            schedules=settings["schedules"],
            micro_batches=settings["micro_batches"],
            rounds=settings["rounds"],
            threads=settings["threads"] or None,
            progress=follow,
            show=show,
        )

    def headline(self, result: PipelineStudy) -> str:
        return result.headline

    def outcome(self, result: PipelineStudy) -> Outcome:
        return result.outcome
