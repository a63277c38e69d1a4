"""Exercise: the time of a token, predicted from bytes and measured."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from labkit.notebooks.workshop.answers import OPEN, read_answers
from labkit.notebooks.workshop.exercises import Attempt, Remark, Report

if TYPE_CHECKING:
    from labkit.harness.records import Measurement

FILE = "answers.toml"
MODELS = ("gpt2", "smollm2-shape", "llama-shape")
NEAR = 0.25  # largest error of a right prediction, as a fraction
EPOCHS, PROMPT, NEW = 3, 16, 32


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
    predicted = {name: answers.get(name, OPEN) for name in ("gb_s", "float32_ms", "int8_ms", "times_faster")}
    for name, value in predicted.items():
        if value == OPEN:
            return Report((Remark(f"{name}: not answered yet; predict first, then measure", right=False),))
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            return Report((Remark(f"{name}: got {value!r:.40}, expected a number, such as 12.5", right=False),))
    case = comparison_case(model=attempt.parameters["model"], dtype="float32", batch=1, prompt=PROMPT, new=NEW)
    (measured,) = compare_with_each(("fused",), "fused-int8", case, Schedule(rounds=EPOCHS, stages=False))
    ratio = measured.ratio("per_token").value
    times = {"float32_ms": measured.baseline, "int8_ms": measured.candidate}
    return Report(
        (
            *(_of_time(name, predicted[name], predicted["gb_s"], side) for name, side in times.items()),
            _near(
                "times_faster", f"you predicted {predicted['times_faster']:.3g}", predicted["times_faster"], ratio, "x"
            ),
        )
    )


def _of_time(name: str, predicted_ms: float, predicted_gb_s: float, side: Measurement) -> Remark:
    """A remark on a predicted time. The rate of the memory may have changed since the prediction, which then says
    something about the time at the new rate.
    """
    words, now_gb_s = f"you predicted {predicted_ms:.3g} ms", side.read_bandwidth_gb_s
    if now_gb_s:
        predicted_ms *= predicted_gb_s / now_gb_s
        words += f" at {predicted_gb_s:.3g} GB/s, so {predicted_ms:.3g} ms at the {now_gb_s:.3g} GB/s of now"
    share = f", {side.floor_share:.0%} of the limit" if side.floor_share else ""
    return _near(name, words, predicted_ms, side.per_token_ms, f" ms{share}")


def _near(name: str, words: str, predicted: float, measured: float, unit: str) -> Remark:
    error = predicted / measured - 1
    words = f"{name}: {words}; measured are {measured:.3g}{unit}"
    if abs(error) <= NEAR:
        return Remark(words, right=True)
    return Remark(f"{words}: {abs(error):.0%} too {'high' if error > 0 else 'low'}", right=False)
