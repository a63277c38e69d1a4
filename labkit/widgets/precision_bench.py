"""Several precisions of a model, with controls for the settings."""

from __future__ import annotations

from typing import Any

from labkit.studies.outcome import Outcome
from labkit.studies.precision import PRECISIONS, PrecisionStudy, parse_precisions, study_precision
from labkit.system.partly import Show
from labkit.system.progress import Progress
from labkit.widgets.bench import Bench


class PrecisionBench(Bench[PrecisionStudy]):
    """Runs `study_precision`."""

    kind = PrecisionStudy

    def __init__(
        self,
        *,
        model: str,
        precisions: str = PRECISIONS,
        tokens: int = 2048,
        new_tokens: int = 32,
        rounds: int = 6,
        threads: int = 0,
        question: str = "",
    ) -> None:
        """Takes the settings of `study_precision`.

        - model: a preset, a checkpoint folder or a hub id.
        - precisions: names as for `labkit evaluate --dtype`, separated by commas; the first is the baseline.
        - tokens: tokens of the text that each precision predicts.
        - new_tokens: tokens to generate.
        - rounds: runs of each precision, interleaved.
        - threads: 0: the number that torch would use.
        - question: for chat models.
        """
        texts = {"model": model, "precisions": precisions, "question": question}
        sizes = {"tokens": tokens, "new_tokens": new_tokens, "rounds": rounds, "threads": threads}
        super().__init__(texts | sizes, {}, {"precisions": parse_precisions})

    def measure(self, settings: dict[str, Any], follow: Progress, show: Show) -> PrecisionStudy:
        return study_precision(
            settings["model"],
            settings["precisions"],
            tokens=settings["tokens"],
            new=settings["new_tokens"],
            rounds=settings["rounds"],
            threads=settings["threads"] or None,
            question=settings["question"],
            progress=follow,
            show=show,
        )

    def headline(self, result: PrecisionStudy) -> str:
        return result.headline

    def outcome(self, result: PrecisionStudy) -> Outcome:
        return result.outcome
