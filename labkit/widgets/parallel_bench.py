"""One rank against more ranks, with controls for the settings."""

from __future__ import annotations

from typing import Any

from labkit.models.dtypes import FLOAT_DTYPES
from labkit.studies.outcome import Outcome
from labkit.studies.parallel import ParallelStudy, parse_sizes, study_parallel
from labkit.system.partly import Show
from labkit.system.progress import Progress
from labkit.widgets.bench import Bench

SIZES = ("1,2", "1,2,4", "1,2,4,8")


class ParallelBench(Bench[ParallelStudy]):
    """Runs `study_parallel`."""

    kind = ParallelStudy

    def __init__(
        self,
        *,
        model: str,
        tp_sizes: str = "1,2",
        dtype: str = "float32",
        prompt_tokens: int = 128,
        new_tokens: int = 64,
        rounds: int = 6,
        threads: int = 0,
    ) -> None:
        """Takes the settings of `study_parallel`.

        - model: a preset, a checkpoint folder or a hub id.
        - tp_sizes: numbers of ranks, separated by commas.
        - dtype: type of weights and activations.
        - prompt_tokens: tokens of each prompt.
        - new_tokens: tokens to generate.
        - rounds: runs of each number of ranks, interleaved.
        - threads: of each rank; 0: the cores are divided among the largest number of ranks.
        """
        texts = {"model": model, "tp_sizes": tp_sizes, "dtype": dtype}
        sizes = {"prompt_tokens": prompt_tokens, "new_tokens": new_tokens, "rounds": rounds, "threads": threads}
        choices = {"dtype": FLOAT_DTYPES, "tp_sizes": SIZES}
        super().__init__(texts | sizes, choices, {"tp_sizes": parse_sizes})

    def measure(self, settings: dict[str, Any], follow: Progress, show: Show) -> ParallelStudy:
        return study_parallel(
            settings["model"],
            settings["tp_sizes"],
            dtype=settings["dtype"],
            prompt=settings["prompt_tokens"],
            new=settings["new_tokens"],
            rounds=settings["rounds"],
            threads=settings["threads"] or None,
            progress=follow,
            show=show,
        )

    def headline(self, result: ParallelStudy) -> str:
        return result.headline

    def outcome(self, result: ParallelStudy) -> Outcome:
        return result.outcome
