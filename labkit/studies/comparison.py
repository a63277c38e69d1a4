"""The study of two sides on one case: all that the first notebook needs in one call."""

from __future__ import annotations

import os
from typing import Annotated

from labkit.harness.compare.choosing import sample_text
from labkit.harness.compare.compare import compare
from labkit.harness.compare.sides import IN_PROCESS
from labkit.harness.comparison import Comparison
from labkit.studies.settings import (
    Batch,
    Epochs,
    FloatDtype,
    Model,
    NewTokens,
    PromptTokens,
    Question,
    StudySetting,
    Threads,
)
from labkit.system.output_folder import RUNS
from labkit.system.partly import Show
from labkit.system.progress import Progress


def study_comparison(
    *,
    model: Model = "smollm2-135m",
    dtype: FloatDtype = "float32",
    batch: Batch = 1,
    prompt_tokens: PromptTokens = 128,
    new_tokens: NewTokens = 64,
    baseline: Annotated[
        str, StudySetting("the side with which the fused engine is compared", choices=IN_PROCESS)
    ] = "hf-eager",
    sample: Annotated[
        str,
        StudySetting(
            "settings with which both sides sample (docs/measuring.md); empty: greedy search", check=sample_text
        ),
    ] = "",
    threads: Threads = 0,
    rounds: Epochs = 0,
    question: Question = "What is the capital of France?",
    output: str | os.PathLike[str] = RUNS,
    progress: Progress | None = None,
    show: Show | None = None,
) -> Comparison:
    """Compares the fused engine with a baseline.

    - output: folder for the record.
    - progress: receives the progress.
    - show: receives the comparison after each epoch from the third on, and before stages and answers.

    Errors as from `labkit.compare`.
    """
    return compare(
        baseline=baseline,
        model=model,
        dtype=dtype,
        batch=batch,
        prompt=prompt_tokens,
        new=new_tokens,
        sample=sample,
        threads=threads or None,
        rounds=rounds or None,
        question=question,
        output=output,
        progress=progress,
        show=show,
    )
