"""Prompts with equal rows, for beams and for several answers to one text. Equal rows are read once."""

from __future__ import annotations

from collections.abc import Generator

import torch
from torch import Tensor

from labkit.engine.runners.step import StepInput, StepOutput


def read_prompt(step: StepInput, times: int) -> Generator[StepInput, StepOutput, StepOutput]:
    """Requests the step of a prompt, and returns its output. If each `times` rows are equal, and the cache is empty,
    it requests the first row of each text, and repeats it in cache and output.
    """
    cache = step.cache
    if times == 1 or cache.length or cache.is_initialized or cache.device.type != "cpu" or not _repeats(step, times):
        return (yield step)
    output = yield step._replace(
        tokens=_first_of(step.tokens, times),
        attention_mask=_first_of(step.attention_mask, times),
        position_ids=_first_of(step.position_ids, times),
    )
    cache.batch_repeat_interleave(times)
    assert output.result is not None
    return output._replace(result=output.result.repeat_interleave(times, dim=0))


def _repeats(step: StepInput, times: int) -> bool:
    """Whether the step's rows are groups of `times` equal rows, one group for each text."""
    per_row = (step.tokens, step.attention_mask, step.position_ids)
    tables = [table for table in per_row if table is not None and len(table) > 1]
    return all(
        len(table) % times == 0 and torch.equal(table[::times].repeat_interleave(times, dim=0), table)
        for table in tables
    )


def _first_of(table: Tensor | None, times: int) -> Tensor | None:
    return table if table is None or len(table) == 1 else table[::times].contiguous()
