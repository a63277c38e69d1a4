"""The sides of the GPU bench. They run in one process and share one set of random weights on the device.

One process cannot pause a generation of one side while another side generates, and the weights of all sides lie in the
same place, so whole generations take turns, in rounds.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, cast

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from labkit.engine.team_size import team_size
from labkit.harness.compare.loaded_side import LoadedSide
from labkit.harness.compare.loader import load_side
from labkit.harness.compare.sampling import Turns
from labkit.harness.comparison import Comparison
from labkit.harness.environment import read_environment
from labkit.harness.records import Measurement
from labkit.harness.roofline import count_work, probe_bandwidth
from labkit.harness.rounds import Turn, turns
from labkit.harness.runs import Case, Run
from labkit.harness.timing import Times, timed_generate
from labkit.kernels import gpu
from labkit.models.policies import model_config_of
from labkit.models.shards import Cut
from labkit.weights.model_tensors import ModelTensors
from labkit.weights.resolve import resolve
from labkit.weights.source import ModelSource

DTYPE = torch.float16
OURS = ("fused", "fused-int8")


@dataclass(frozen=True)
class OnDevice:
    """A preset with random weights on the device, which all sides share."""

    name: str
    hf_config: PretrainedConfig
    model: PreTrainedModel

    @classmethod
    def of(cls, name: str) -> OnDevice:
        config = resolve(name).hf_config
        torch.manual_seed(0)
        with torch.device(gpu.default_device()):
            model = AutoModelForCausalLM.from_config(config, dtype=DTYPE, trust_remote_code=False).eval()
        model.generation_config.eos_token_id = None
        return cls(name, config, model)

    @property
    def tokenizer(self) -> None:
        """None, since prompts are random tokens."""
        return None

    def hf_model(self, dtype: torch.dtype) -> PreTrainedModel:
        """A copy of the model that shares its parameters, so that a side may change its methods."""
        assert dtype == DTYPE
        return copy.copy(self.model)

    def names(self) -> set[str]:
        return self._tensors.names()

    def get(self, name: str, dtype: torch.dtype | None = None, cut: Cut | None = None) -> Tensor:
        return self._tensors.get(name, dtype, cut)

    @cached_property
    def _tensors(self) -> ModelTensors:
        return ModelTensors(self.model)


@dataclass(frozen=True)
class GpuCase:
    """Random prompts, new ones in each round, and greedy tokens after them."""

    batch: int
    new: int  # greedy tokens after each prompt
    rounds: int
    prompt: int  # tokens


def compared(source: OnDevice, baselines: Sequence[str], case: GpuCase) -> Iterator[list[Comparison]]:
    """Yields an empty list after each run, and at the end the comparisons of each of `OURS` with every baseline."""
    names = (*baselines, *OURS)
    sides = {name: _side(name, source) for name in names}
    runs: dict[str, list[Run]] = {name: [] for name in names}
    tokens: dict[str, list[Any]] = {name: [] for name in names}
    for turn in _turns(sides, source, case):
        times, new_tokens = turn.result
        runs[names[turn.side]].append(Run.of(times, round=turn.round, before=turn.before, after=turn.after))
        tokens[names[turn.side]].append(new_tokens)
        yield []
    measured = Turns(
        sides=tuple(_measurement(name, side, source, case, runs[name]) for name, side in sides.items()),
        tokens=tuple(tokens.values()),
    )
    sides.clear()
    free_memory()
    yield [measured.comparison(names.index(name), names.index(candidate)) for candidate in OURS for name in baselines]


def free_memory() -> None:
    """Frees unreferenced memory, also on the device."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _turns(sides: Mapping[str, LoadedSide], source: OnDevice, case: GpuCase) -> Iterator[Turn[tuple[Times, list[Any]]]]:
    """Warms up every side, then yields the turns with the times and the new tokens of the side."""
    generator = torch.Generator().manual_seed(1)
    shape = (case.rounds + 1, case.batch, case.prompt)
    prompts = torch.randint(1, source.hf_config.vocab_size, shape, generator=generator).to(source.model.device)
    options: dict[str, Any] = {
        "attention_mask": torch.ones_like(prompts[0]),
        "do_sample": False,
        "pad_token_id": 0,
        "max_new_tokens": case.new,
    }

    def run(side: LoadedSide, index: int) -> tuple[Times, list[Any]]:
        times, sequences = timed_generate(side, prompts[index], **options)
        return times, sequences[:, case.prompt :].tolist()

    for side in sides.values():
        side.generate(prompts[case.rounds], **options)
    runs = [partial(run, side) for side in sides.values()]
    threads, device = team_size(), gpu.default_device()
    return turns(runs, range(case.rounds), probe=lambda side: probe_bandwidth(threads, device))


def _measurement(name: str, side: LoadedSide, source: OnDevice, case: GpuCase, runs: Sequence[Run]) -> Measurement:
    threads = team_size()
    return Measurement(
        name=name,
        impl=side.impl,
        case=Case(
            model=source.name,
            origin="random weights of the real shape",
            dtype="float16",
            batch=case.batch,
            prompt_tokens=case.prompt,
            new_tokens=case.new,
            threads=threads,
        ),
        environment=read_environment(threads),
        work=count_work(model_config_of(source.hf_config), side.weights, case.batch, case.prompt, case.new),
        runs=tuple(runs),
        nodes=side.graph_nodes,
    )


def _side(name: str, source: OnDevice) -> LoadedSide:
    ours = {"impl": "triton"} if name in OURS else {}
    return load_side(name, cast(ModelSource, source), DTYPE, team_size(), **ours)
