"""A comparison of two sides, with controls for its settings."""

from __future__ import annotations

from typing import Any

from labkit.figures.summary import headline, outcome
from labkit.harness import Comparison
from labkit.harness.compare.compare import compare
from labkit.harness.compare.sides import IN_PROCESS
from labkit.models.dtypes import FLOAT_DTYPES
from labkit.studies.outcome import Outcome
from labkit.system.partly import Show
from labkit.system.progress import Progress
from labkit.widgets.bench import Bench


class Workbench(Bench[Comparison]):
    """Runs `labkit.compare`."""

    kind = Comparison

    def __init__(
        self,
        *,
        model: str,
        dtype: str = "float32",
        batch: int = 1,
        prompt_tokens: int = 128,
        new_tokens: int = 64,
        baseline: str = "hf-eager",
        threads: int = 0,
        rounds: int = 6,
        question: str = "",
    ) -> None:
        """Takes the settings of `labkit.compare`.

        - model: a preset, a checkpoint folder or a hub id.
        - dtype: type of weights and activations.
        - batch: sequences in a batch.
        - prompt_tokens: tokens of each prompt.
        - new_tokens: tokens to generate.
        - baseline: the side with which the fused engine is compared.
        - threads: 0: the number that torch would use.
        - rounds: runs of each side, interleaved.
        - question: for chat models.
        """
        texts = {"model": model, "dtype": dtype}
        sizes = {"batch": batch, "prompt_tokens": prompt_tokens, "new_tokens": new_tokens}
        settings = texts | sizes | {"baseline": baseline, "threads": threads, "rounds": rounds}
        settings |= {"question": question} if question else {}
        super().__init__(settings, {"dtype": FLOAT_DTYPES, "baseline": IN_PROCESS})

    def measure(self, settings: dict[str, Any], follow: Progress, show: Show) -> Comparison:
        return compare(
            baseline=settings["baseline"],
            model=settings["model"],
            dtype=settings["dtype"],
            batch=settings["batch"],
            prompt=settings["prompt_tokens"],
            new=settings["new_tokens"],
            threads=settings["threads"] or None,
            rounds=settings["rounds"],
            question=settings.get("question", ""),
            progress=follow,
            show=show,
        )

    def headline(self, result: Comparison) -> str:
        return headline(result)

    def outcome(self, result: Comparison) -> Outcome:
        return outcome(result)
