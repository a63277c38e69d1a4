"""A model larger than memory, with controls for the settings."""

from __future__ import annotations

from typing import Any

from labkit.studies.larger_than_memory import (
    BASELINES,
    StreamingStudy,
    parse_batches,
    study_larger_than_memory,
)
from labkit.studies.outcome import Outcome
from labkit.system.partly import Show
from labkit.system.progress import Progress
from labkit.weights.precision import precision_of
from labkit.widgets.bench import Bench

PRECISIONS = ("bfloat16", "float32", "int8-32+head", "int4-64+head8")


class StreamingBench(Bench[StreamingStudy]):
    """Runs `study_larger_than_memory`."""

    kind = StreamingStudy

    def __init__(
        self,
        *,
        model: str,
        precision: str = "bfloat16",
        memory_gb: float = 0.5,
        batches: str = "1, 4, 16",
        prompt_tokens: int = 16,
        new_tokens: int = 8,
        baselines: str = BASELINES,
        rounds: int = 2,
        path: str = "",
        threads: int = 0,
    ) -> None:
        """Takes the settings of `study_larger_than_memory`.

        - model: a preset, a checkpoint folder or a hub id.
        - precision: a name as for `labkit evaluate --dtype`.
        - memory_gb: GB (1e9 bytes) for weights, slots, caches and workspace together.
        - batches: batch sizes, separated by commas.
        - prompt_tokens: tokens of each prompt.
        - new_tokens: tokens to generate.
        - baselines: sides of `labkit compare`, separated by commas; or none.
        - rounds: runs of each batch size and baseline.
        - path: a folder on the disk for offloaded layers; empty: a temporary one.
        - threads: 0: the number that torch would use.
        """
        texts = {"model": model, "precision": precision, "batches": batches, "baselines": baselines, "path": path}
        sizes = {"prompt_tokens": prompt_tokens, "new_tokens": new_tokens, "rounds": rounds, "threads": threads}
        checks = {"batches": parse_batches, "precision": precision_of}
        super().__init__(texts | {"memory_gb": memory_gb} | sizes, {"precision": PRECISIONS}, checks)

    def measure(self, settings: dict[str, Any], follow: Progress, show: Show) -> StreamingStudy:
        return study_larger_than_memory(
            settings["model"],
            precision=settings["precision"],
            memory_gb=settings["memory_gb"],
            batches=settings["batches"],
            prompt=settings["prompt_tokens"],
            new=settings["new_tokens"],
            baselines=settings["baselines"],
            rounds=settings["rounds"],
            path=settings["path"],
            threads=settings["threads"] or None,
            progress=follow,
            show=show,
        )

    def headline(self, result: StreamingStudy) -> str:
        return result.headline

    def outcome(self, result: StreamingStudy) -> Outcome:
        return result.outcome
