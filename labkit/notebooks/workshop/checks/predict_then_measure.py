"""Exercise: the time of a token, predicted from bytes and measured."""

from __future__ import annotations

from typing import Any

import numpy as np

from labkit.notebooks.workshop.answers import OPEN, read_answers
from labkit.notebooks.workshop.exercises import Attempt, Remark, Report

FILE = "answers.toml"
MODELS = ("gpt2", "smollm2-shape", "llama-shape")
NEAR, NEAR_RATIO = 0.30, 0.15  # largest error of a right prediction, as a fraction
EPOCHS, PROMPT, NEW = 3, 16, 48


def parameters(rng: np.random.Generator) -> dict[str, Any]:
    from labkit.models.policies import model_config_of
    from labkit.models.presets import PRESETS

    model = str(rng.choice(MODELS))
    config = model_config_of(PRESETS[model].hf_config)
    layer = sum(int(np.prod(shape)) for shape in config.layer_shapes().values() if len(shape) == 2)
    head = config.vocab_size * config.hidden_size
    return {
        "model": model,
        "layers_m": round(config.num_layers * layer / 1e6, 1),
        "head_m": round(head / 1e6, 1),
    }


def check(attempt: Attempt) -> Report:
    """Whether the predictions are near what is measured now."""
    from labkit.harness.compare.compare import compare_with_each, comparison_case
    from labkit.harness.compare.plan import Schedule

    answers = read_answers(attempt.folder / FILE)
    if isinstance(answers, Remark):
        return Report((answers,))
    predicted = {name: answers.get(name, OPEN) for name in ("float32_ms", "int8_ms", "times_faster")}
    for name, value in predicted.items():
        if value == OPEN:
            return Report((Remark(f"{name}: not answered yet; predict first, then measure", right=False),))
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            return Report((Remark(f"{name}: got {value!r:.40}, expected a number, such as 12.5", right=False),))
    case = comparison_case(model=attempt.parameters["model"], dtype="float32", batch=1, prompt=PROMPT, new=NEW)
    (measured,) = compare_with_each(("fused",), "fused-int8", case, Schedule(rounds=EPOCHS, stages=False))
    ratio = measured.ratio("per_token").value
    share = measured.baseline.floor_share
    limit = f", {share:.0%} of the limit" if share else ""
    return Report(
        (
            _near("float32_ms", predicted["float32_ms"], measured.baseline.per_token_ms, NEAR, f" ms{limit}"),
            _near("int8_ms", predicted["int8_ms"], measured.candidate.per_token_ms, NEAR, " ms"),
            _near("times_faster", predicted["times_faster"], ratio, NEAR_RATIO, "x"),
        )
    )


def _near(name: str, predicted: float, measured: float, most: float, unit: str) -> Remark:
    error = predicted / measured - 1
    words = f"{name}: you predicted {predicted:.3g}, measured are {measured:.3g}{unit}"
    if abs(error) <= most:
        return Remark(words, right=True)
    return Remark(f"{words}: {abs(error):.0%} too {'high' if error > 0 else 'low'}", right=False)
