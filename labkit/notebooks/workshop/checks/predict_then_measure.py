"""Exercise: the time of a token, predicted from bytes and measured.

Both versions are engines of this process, because a check should answer in seconds, and the start of a process that
computes takes most of them. They take turns of a few tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np

from labkit.notebooks.verdicts import number_or_remark
from labkit.notebooks.workshop.answers import OPEN, read_answers
from labkit.notebooks.workshop.exercises import Attempt, Remark, Report

if TYPE_CHECKING:
    from labkit.engine import InferenceEngine
    from labkit.harness.rounds import Turn

FILE = "answers.toml"
MODELS = ("gpt2", "smollm2-shape")
PRECISIONS = {"float32_ms": "float32", "int8_ms": "int8+head"}  # of the weights, by the name of the predicted time
NEAR = 0.25  # largest error of a right prediction, as a fraction
ROUNDS, PROMPT, NEW = 3, 4, 12
UNTIMED_S = 0.4  # before the first round: in this time an engine learns how to read this memory


@dataclass(frozen=True)
class Measured:
    """How long a token takes with one type of weights."""

    per_token_ms: float  # median
    gb_s: float | None  # median of the memory's rate before and after the turns; None: it could not be probed
    limit_ms: float | None  # least time of a token at this rate


def prepare() -> None:
    """Compiles the kernels that the check runs, unless they are there."""
    from labkit.kernels.build import compile_library
    from labkit.weights.precision import precision_of

    for name in PRECISIONS.values():
        compile_library(str(precision_of(name).dtype).removeprefix("torch."))


def parameters(rng: np.random.Generator) -> dict[str, Any]:
    from labkit.models.policies import model_config_of
    from labkit.models.presets import PRESETS

    model = str(rng.choice(MODELS))
    config = model_config_of(PRESETS[model].hf_config)
    layer = sum(int(np.prod(shape)) for shape in config.layer_shapes().values() if len(shape) == 2)
    head = config.vocab_size * config.hidden_size
    return {
        "model": model,
        "millions_in_layers": round(config.num_layers * layer / 1e6, 1),
        "millions_in_head": round(head / 1e6, 1),
    }


def check(attempt: Attempt) -> Report:
    """Whether the predictions are near what is measured now."""
    answers = read_answers(attempt.folder / FILE)
    if isinstance(answers, Remark):
        return Report((answers,))
    predicted = {name: answers.get(name, OPEN) for name in ("gb_s", *PRECISIONS, "times_faster")}
    for name, value in predicted.items():
        if value == OPEN:
            return Report((Remark(f"{name}: not answered yet; predict first, then measure", right=False),))
        number = number_or_remark(value)
        if isinstance(number, str):
            return Report((Remark(f"{name}: {number}", right=False),))
        if number <= 0:
            return Report((Remark(f"{name}: got {number:g}, expected more than 0", right=False),))
    float32, int8 = measured = _measure(attempt.parameters["model"], attempt.random)
    times = zip(PRECISIONS, measured, strict=True)
    faster, ratio = predicted["times_faster"], float32.per_token_ms / int8.per_token_ms
    return Report(
        (
            *(_of_time(name, predicted[name], predicted["gb_s"], time) for name, time in times),
            _near("times_faster", f"you predicted {faster:.3g}", faster, ratio, "x"),
        )
    )


def _measure(model: str, random: np.random.Generator) -> list[Measured]:
    """The time of a token with each type of weights, measured in turns."""
    import torch

    import labkit
    from labkit.engine.team_size import team_size
    from labkit.harness.roofline import probe_bandwidth
    from labkit.harness.rounds import turns
    from labkit.harness.timing import TokenClock, collector_paused
    from labkit.weights.precision import precision_of

    source = labkit.resolve(model)
    engines = [labkit.init_inference(source, **precision_of(name).options) for name in PRECISIONS.values()]

    def generate(engine: InferenceEngine, _round: int = 0) -> list[float]:
        """Milliseconds of each step after the first token."""
        prompt, clock = torch.from_numpy(random.integers(0, engine.config.vocab_size, (1, PROMPT))), TokenClock()
        engine.generate(
            prompt.to(engine.device), do_sample=False, eos_token_id=None, max_new_tokens=NEW, streamer=clock
        )
        return (np.diff(clock.stamps_ns) / 1e6).tolist()

    sides = [partial(generate, engine) for engine in engines]
    with collector_paused():
        for engine in engines:
            begun = perf_counter()
            while perf_counter() < begun + UNTIMED_S:
                generate(engine)
        timed = list(turns(sides, range(ROUNDS), probe=lambda side: probe_bandwidth(team_size(), engines[side].device)))
    return [_of_engine(engine, [turn for turn in timed if turn.side == side]) for side, engine in enumerate(engines)]


def _of_engine(engine: InferenceEngine, timed: Sequence[Turn[list[float]]]) -> Measured:
    """The medians of an engine's turns. The first step of a turn meets the caches that the other engine left."""
    from labkit.harness.roofline import count_work
    from labkit.harness.stored_weights import stored_by

    per_token_ms = median(step for turn in timed for step in turn.result[1:])
    rates = [rate for turn in timed for rate in (turn.before, turn.after) if rate is not None]
    if not rates:
        return Measured(per_token_ms, None, None)
    gb_s = median(rates)
    work = count_work(engine.model_config, stored_by(engine), 1, PROMPT, NEW)
    return Measured(per_token_ms, gb_s, work.floor_ms(gb_s))


def _of_time(name: str, predicted_ms: float, predicted_gb_s: float, measured: Measured) -> Remark:
    """A remark on a predicted time. The rate of the memory may have changed since the prediction, which then says
    something about the time at the new rate.
    """
    words = f"you predicted {predicted_ms:.3g} ms"
    if measured.gb_s:
        predicted_ms *= predicted_gb_s / measured.gb_s
        words += f" at {predicted_gb_s:.3g} GB/s, so {predicted_ms:.3g} ms at the {measured.gb_s:.3g} GB/s of now"
    share = f", {measured.limit_ms / measured.per_token_ms:.0%} of the limit" if measured.limit_ms else ""
    return _near(name, words, predicted_ms, measured.per_token_ms, f" ms{share}")


def _near(name: str, words: str, predicted: float, measured: float, unit: str) -> Remark:
    error = predicted / measured - 1
    words = f"{name}: {words}; measured are {measured:.3g}{unit}"
    if abs(error) <= NEAR:
        return Remark(words, right=True)
    return Remark(f"{words}: {abs(error):.0%} too {'high' if error > 0 else 'low'}", right=False)
