"""Runs of a mixture of experts: its engine, texts that it draws, and what its steps read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers.generation import BaseStreamer

from labkit.engine import init_inference
from labkit.engine.engine import DecoderEngine
from labkit.engine.runners.stage_clock import StageTime
from labkit.models.config import ModelConfig
from labkit.models.dtypes import FLOAT_DTYPES
from labkit.stages import Phase, Stage
from labkit.studies.experts_study import ReadByBatch
from labkit.weights.skewed_router import SkewedRouter
from labkit.weights.source import ModelSource

STEPS = 6  # decode steps of each batch


def skewed(source: ModelSource, skew: float) -> ModelSource:
    """The model with skewed routers, see `SkewedRouter`."""
    return replace(source, weights=SkewedRouter(source.weights, skew)) if skew else source


def skewed_engine(source: ModelSource, dtype: str, skew: float, **options: Any) -> DecoderEngine:
    """The fused engine with skewed routers. options: of `init_inference`."""
    engine = init_inference(skewed(source, skew), dtype=FLOAT_DTYPES[dtype], impl="cpp", **options)
    assert isinstance(engine, DecoderEngine)
    return engine


def prompt_of(config: ModelConfig, batch: int, tokens: int) -> Tensor:
    """Random tokens [batch, tokens], the same ones each time."""
    return torch.randint(config.vocab_size, (batch, tokens), generator=torch.Generator().manual_seed(0))


def draw_text(engine: DecoderEngine, ids: Tensor, new: int, streamer: BaseStreamer | None = None) -> None:
    """Draws the new tokens, the same ones each time. A model with random weights would repeat its likeliest token."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        arguments = {"do_sample": True, "top_k": 0, "eos_token_id": None, "pad_token_id": 0}
        engine.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, streamer=streamer, **arguments)


def steps_of(engine: DecoderEngine, config: ModelConfig, batch: int) -> ReadByBatch:
    """What some decode steps of a batch read. Every sequence begins with other tokens."""
    ids = prompt_of(config, batch, 4)
    draw_text(engine, ids, STEPS + 1)
    engine.stage_times(reset=True)
    draw_text(engine, ids, STEPS + 1)
    (read,) = (read for read in engine.experts_read() if read.phase is Phase.DECODE)
    times = [time for time in engine.stage_times(reset=True) if time.phase is Phase.DECODE]
    return ReadByBatch(
        batch=batch,
        by_layer=read.by_layer,
        experts_ms=step_ms(times, Stage.EXPERTS) / read.calls,
        sums_ms=step_ms(times, Stage.ALL_REDUCE) / read.calls,
        step_ms=step_ms(times, *Stage) / read.calls,
    )


def step_ms(times: Sequence[StageTime], *stages: Stage) -> float:
    return sum(time.total_ms for time in times if time.stage in stages)
