"""One rank's part in measuring schedules: it generates with one schedule after the other and notes its spans.

`labkit.launch` calls all ranks with the same arguments. One engine serves all schedules, so nothing else differs.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from labkit.engine import init_inference
from labkit.engine.engine import FusedEngine
from labkit.engine.options import PipelineParallel
from labkit.engine.parallel.pipeline_stage import PipelineSpan, PipelineStage
from labkit.harness.frozen_record import FrozenRecord
from labkit.harness.timing import TokenClock
from labkit.models.dtypes import dtype_of
from labkit.system.others_clock import OthersClock
from labkit.weights.resolve import resolve

WARM_UP = 4  # new tokens of the untimed generation, in which the engine tries its ways of reading the weights


class Setting(FrozenRecord):
    """A schedule with its micro-batches, on a batch."""

    schedule: str  # of a pipeline; empty for tensor parallelism
    micro_batches: int
    batch: int


class PipelineTurns(FrozenRecord):
    """A case, and the settings that take turns on it."""

    model: str
    dtype: str
    ranks: int  # the stages of a pipeline, or the ranks of tensor parallelism
    tensor_parallel: bool
    prompt_tokens: int
    new_tokens: int
    rounds: int
    settings: tuple[Setting, ...]  # each generates once in each round
    seed: int = 0


@dataclass(frozen=True)
class Generated:
    """Notes of a rank on one generation."""

    setting: int
    begin_ns: int
    end_ns: int
    spans: tuple[PipelineSpan, ...] = ()
    stamps_ns: tuple[int, ...] = ()  # of the tokens, without stages


@dataclass(frozen=True)
class RankFindings:
    """Notes of a rank on all generations."""

    layers: tuple[int, ...]  # of each stage
    pinned: bool
    others_cores: float | None  # processors that other programs kept busy
    generated: tuple[Generated, ...]  # in order of time


def take_turns_on_rank(turns: PipelineTurns) -> RankFindings:
    """Generates all turns; every rank calls it. Rank 0 prints the progress as lines of JSON."""
    engine = _engine(turns)
    gc.collect()
    gc.disable()
    for number in range(len(turns.settings)):
        _report(turns, number, "warming up")
        _generate(engine, turns, number, WARM_UP)
    pids: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())
    others_clock, generated = OthersClock(pids), list[Generated]()
    for round in range(turns.rounds):
        for number in range(len(turns.settings)):
            _report(turns, (round + 1) * len(turns.settings) + number, f"round {round + 1} of {turns.rounds}")
            generated.append(_generate(engine, turns, number, turns.new_tokens))
    stage = engine.pipeline
    return RankFindings(
        layers=tuple(len(layers) for layers in stage.layers) if stage else (engine.model_config.num_layers,),
        pinned=len(os.sched_getaffinity(0)) < (os.cpu_count() or 1),
        others_cores=others_clock.lap(),
        generated=tuple(generated),
    )


def _engine(turns: PipelineTurns) -> FusedEngine:
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    options: dict[str, Any] = {"pipeline_parallel": {"pp_size": turns.ranks}}
    if turns.tensor_parallel:
        options = {"tensor_parallel": {"tp_size": turns.ranks}}
    engine = init_inference(resolve(turns.model, seed=turns.seed), dtype=dtype_of(turns.dtype), **options)
    assert isinstance(engine, FusedEngine)
    engine.generation_config.eos_token_id = None  # an end-of-text token must not end a generation
    return engine


def _generate(engine: FusedEngine, turns: PipelineTurns, number: int, new: int) -> Generated:
    setting, stage = turns.settings[number], engine.pipeline
    if stage is not None:
        stage.options = _parallelism(setting, stage)
        stage.take_spans()
    shape = (setting.batch, turns.prompt_tokens)
    drawn = np.random.default_rng(turns.seed + 1).integers(0, engine.model_config.vocab_size, shape)
    ids, clock = torch.from_numpy(drawn), TokenClock()
    arguments: dict[str, Any] = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": new}
    if stage is None:
        arguments["streamer"] = clock
    dist.barrier()
    begin = perf_counter_ns()
    engine.generate(ids, attention_mask=torch.ones_like(ids), **arguments)
    end = perf_counter_ns()
    return Generated(number, begin, end, tuple(stage.take_spans()) if stage else (), tuple(clock.stamps_ns))


def _parallelism(setting: Setting, stage: PipelineStage) -> PipelineParallel:
    parts: int | str = "auto" if setting.schedule == "naive" else setting.micro_batches
    options = {"pp_size": stage.count, "schedule": setting.schedule, "micro_batches": parts}
    return PipelineParallel.model_validate(options)


def _report(turns: PipelineTurns, done: int, label: str) -> None:
    if dist.get_rank() == 0:
        setting = turns.settings[done % len(turns.settings)]
        text = f"{setting.schedule or 'tensor parallel'}, {setting.batch} rows in {setting.micro_batches}"
        total = (turns.rounds + 1) * len(turns.settings)
        sys.stdout.write(json.dumps({"done": done, "total": total, "label": f"{label}: {text}"}) + "\n")
        sys.stdout.flush()
