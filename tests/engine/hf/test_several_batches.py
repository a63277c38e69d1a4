"""Concurrent decode loops: each batch gets the tokens that it gets alone, and no batch waits needlessly."""

from collections import deque
from typing import Any

import pytest
import torch
from helpers.models.engines import fused, greedy, prompt, vanilla
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation import MaxLengthCriteria

import labkit
from labkit.engine.hf.causal_lm import FusedCausalLM
from labkit.engine.hf.texts import GenerateTexts
from labkit.engine.runners.driving import Loop, drive
from labkit.engine.runners.step import Pending, StepInput, StepOutput


def loop_of(model: FusedCausalLM, ids: Tensor, new: int, **options: Any) -> Loop:
    """Decode loop as `generate` would run it."""
    config = GenerationConfig(use_cache=True, **options)
    config._pad_token_tensor = torch.tensor(0)
    criteria = StoppingCriteriaList([MaxLengthCriteria(ids.shape[1] + new)])
    return GenerateTexts(
        model.new_cache(),
        own_cache=True,
        hf_cache=None,
        tokens=ids,
        processors=LogitsProcessorList(),
        criteria=criteria,
        config=config,
        streamer=None,
        model_kwargs={},
    ).loop()


BATCHES = [(prompt(1, 5), 6), (prompt(3, 9, seed=1), 3), (prompt(2, 4, seed=2), 9)]


@pytest.mark.parametrize("impl", ["cpp", "reference"])
def test_batches_side_by_side_get_the_tokens_of_each_alone(impl: str) -> None:
    engine = fused("llama", impl)
    texts = drive(engine.module.runner.begin, [loop_of(engine.module, ids, new) for ids, new in BATCHES])
    for text, (ids, new) in zip(texts, BATCHES, strict=True):
        assert torch.equal(text, greedy(engine, ids, new))


def test_steps_of_all_batches_are_under_way_before_one_is_collected() -> None:
    model = labkit.init_inference(vanilla("gpt2")).module  # its first steps are compared, so each has one token
    events: deque[tuple[str, int]] = deque()

    class Late:
        """Records when a step began, and when its result was collected."""

        def __init__(self, step: StepInput) -> None:
            self.batch = step.shape[0]
            events.append(("begun", self.batch))
            self.pending = model.runner.begin(step)

        def collect(self) -> StepOutput:
            events.append(("collected", self.batch))
            return self.pending.collect()

    def begin(step: StepInput) -> Pending:
        return Late(step)

    drive(begin, [loop_of(model, ids, 3) for ids, _ in BATCHES])
    assert list(events)[:3] == [("begun", 1), ("begun", 3), ("begun", 2)]
    rest = list(events)[3:-3]
    assert rest[:4] == [("collected", 1), ("begun", 1), ("collected", 3), ("begun", 3)]
    assert sum(kind == "begun" for kind, _ in events) == sum(kind == "collected" for kind, _ in events) == 9


def test_an_error_in_one_batch_ends_them_all() -> None:
    model = fused("gpt2").module
    too_long = loop_of(model, prompt(1, 190), 9)
    with pytest.raises(ValueError, match="193 tokens are more than the model's 192 positions"):
        drive(model.runner.begin, [too_long, loop_of(model, prompt(1, 4), 20)])
