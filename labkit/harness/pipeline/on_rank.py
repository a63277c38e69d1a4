"""What each rank does while schedules are measured: it generates with one after the other, and notes what it did when.

All ranks are called alike, through `labkit.launch`. One engine serves all schedules: they differ in nothing else.
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

from labkit.engine.engine import FusedEngine
from labkit.engine.options import PipelineParallel
from labkit.engine.parallel.pipeline_stage import PipelineSpan, PipelineStage
from labkit.engine.plan import init_inference
from labkit.harness.records import FrozenRecord
from labkit.harness.timing import TokenClock
from labkit.models.dtypes import dtype_of
from labkit.system.others_clock import OthersClock
from labkit.weights.resolve import resolve

WARM_UP = 4  # new tokens of the generation that is not timed: the engine tries its ways to read the weights in it


class Setting(FrozenRecord):
    """A generation. schedule: of a pipeline; "" for one that is not."""

    schedule: str
    micro_batches: int
    batch: int


class PipelineTurns(FrozenRecord):
    """The settings, of which each is generated in each of `rounds` rounds. ranks: stages of a pipeline, or those that
    share the model otherwise where `tensor_parallel` is set.
    """

    model: str
    dtype: str
    ranks: int
    tensor_parallel: bool
    prompt_tokens: int
    new_tokens: int
    rounds: int
    settings: tuple[Setting, ...]
    seed: int = 0


@dataclass(frozen=True)
class Generated:
    """What a rank noted of one generation. stamps_ns: of the tokens, where there are no stages."""

    setting: int
    begin_ns: int
    end_ns: int
    spans: tuple[PipelineSpan, ...] = ()
    stamps_ns: tuple[int, ...] = ()


@dataclass(frozen=True)
class RankFindings:
    """What a rank noted of all, in the order in which it was done. others_cores: that other programs kept busy."""

    layers: tuple[int, ...]
    pinned: bool
    others_cores: float | None
    generated: tuple[Generated, ...]


def take_turns_on_rank(turns: PipelineTurns) -> RankFindings:
    """Called by every rank alike. Tells what it is at on stdout, a line of JSON each time, on rank 0."""
    engine = _engine(turns)
    gc.collect()
    gc.disable()
    for number in range(len(turns.settings)):
        _tell(turns, number, "warming up")
        _generate(engine, turns, number, WARM_UP)
    pids: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())
    others, found = OthersClock(pids), list[Generated]()
    for round in range(turns.rounds):
        for number in range(len(turns.settings)):
            _tell(turns, (round + 1) * len(turns.settings) + number, f"round {round + 1} of {turns.rounds}")
            found.append(_generate(engine, turns, number, turns.new_tokens))
    stage = engine.pipeline
    return RankFindings(
        layers=tuple(len(layers) for layers in stage.layers) if stage else (engine.model_config.num_layers,),
        pinned=len(os.sched_getaffinity(0)) < (os.cpu_count() or 1),
        others_cores=others.lap(),
        generated=tuple(found),
    )


def _engine(turns: PipelineTurns) -> FusedEngine:
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    how: dict[str, Any] = {"pipeline_parallel": {"pp_size": turns.ranks}}
    if turns.tensor_parallel:
        how = {"tensor_parallel": {"tp_size": turns.ranks}}
    engine = init_inference(resolve(turns.model, seed=turns.seed), dtype=dtype_of(turns.dtype), **how)
    assert isinstance(engine, FusedEngine)
    engine.generation_config.eos_token_id = None  # an end of text ends nothing here
    return engine


def _generate(engine: FusedEngine, turns: PipelineTurns, number: int, new: int) -> Generated:
    setting, stage = turns.settings[number], engine.pipeline
    if stage is not None:
        stage.wanted = _wanted(setting, stage)
        stage.take_spans()
    shape = (setting.batch, turns.prompt_tokens)
    drawn = np.random.default_rng(turns.seed + 1).integers(0, engine.model_config.vocab_size, shape)
    ids, clock = torch.from_numpy(drawn), TokenClock()
    how: dict[str, Any] = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": new}
    if stage is None:
        how["streamer"] = clock
    dist.barrier()
    begin = perf_counter_ns()
    engine.generate(ids, attention_mask=torch.ones_like(ids), **how)
    end = perf_counter_ns()
    return Generated(number, begin, end, tuple(stage.take_spans()) if stage else (), tuple(clock.stamps_ns))


def _wanted(setting: Setting, stage: PipelineStage) -> PipelineParallel:
    parts: int | str = "auto" if setting.schedule == "naive" else setting.micro_batches
    wanted = {"pp_size": stage.count, "schedule": setting.schedule, "micro_batches": parts}
    return PipelineParallel.model_validate(wanted)


def _tell(turns: PipelineTurns, done: int, label: str) -> None:
    if dist.get_rank() == 0:
        setting = turns.settings[done % len(turns.settings)]
        what = f"{setting.schedule or 'tensor parallel'}, {setting.batch} rows in {setting.micro_batches}"
        total = (turns.rounds + 1) * len(turns.settings)
        sys.stdout.write(json.dumps({"done": done, "total": total, "label": f"{label}: {what}"}) + "\n")
        sys.stdout.flush()
