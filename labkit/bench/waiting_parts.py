"""The measurements of `labkit.bench.waiting`. Each part yields its records."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.generation import BaseStreamer

from labkit.bench.page import followed
from labkit.engine import init_inference
from labkit.engine.engine import InferenceEngine
from labkit.engine.runners.stage_clock import StageTime
from labkit.harness.compare.choosing import generation_arguments
from labkit.harness.compare.compare import compare_with_each, comparison_case
from labkit.harness.compare.peers.llama_cpp import LLAMA_CPP
from labkit.harness.compare.plan import Schedule
from labkit.harness.comparison import Comparison
from labkit.harness.environment import Environment
from labkit.harness.roofline import layer_shape, probe_bandwidth, probe_peak
from labkit.harness.rounds import random_orders
from labkit.harness.timing import TokenClock
from labkit.harness.waiting_record import WaitingTime
from labkit.kernels.layer_ops import Pass, layer_cases
from labkit.models.config import ModelConfig
from labkit.models.dtypes import FLOAT_DTYPES
from labkit.stages import Phase, Stage
from labkit.weights.checkpoint.hf_folder import write_checkpoint
from labkit.weights.precision import precision_of
from labkit.weights.resolve import resolve
from labkit.weights.source import ModelSource

SMALL = "smollm2-135m"
LOADED, LOADED_AS = "tinyllama-1.1b", ("bfloat16", "float32", "int8", "int4-64")
VANILLA, FUSED = "hf-eager", "fused"
TURN = 16  # steps of a sample of attention
SHORT, LONG = 8, 72  # new tokens; the difference of both times is without preparation and prompt, which both contain
TEXT = "The best way to read a long book is to begin with"
PADDED = (16, 64, 256, 1000)  # tokens of the prompts of one batch
GREEDY = "greedy"
SAMPLED = "top_k=50,top_p=0.9"  # as `labkit compare --sample` takes it
CHOICES: dict[str, dict[str, Any]] = {
    GREEDY: {"do_sample": False},
    "greedy, a streamer": {"do_sample": False, "streamer": True},
    "greedy, repetition_penalty=1.1": {"do_sample": False, "repetition_penalty": 1.1},
    "greedy, min_new_tokens": {"do_sample": False, "min_new_tokens": LONG, "eos_token_id": 2},
    "greedy, stop_strings": {"do_sample": False, "stop_strings": ["\n\nQuestion: 17"]},
    "all tokens": {"do_sample": True, "top_k": 0},
    "top_k=50": {"do_sample": True, "top_k": 50},
    "top_k=50, top_p=0.9": generation_arguments(SAMPLED),
    "top_p=0.9": {"do_sample": True, "top_k": 0, "top_p": 0.9},
    "top_k=50, top_p=0.9, repetition_penalty=1.1": {**generation_arguments(SAMPLED), "repetition_penalty": 1.1},
    "4 beams": {"do_sample": False, "num_beams": 4},
}


@dataclass(frozen=True)
class WaitingBench:
    """The settings of a bench, which all of its records share."""

    environment: Environment
    threads: int
    rounds: int

    def record(
        self, part: str, source: ModelSource, dtype: str, unit: str, samples: Mapping[str, Sequence[float]], **size: Any
    ) -> WaitingTime:
        return WaitingTime(
            part=part,
            model=source.name,
            origin=source.origin,
            dtype=dtype,
            threads=self.threads,
            unit=unit,
            samples={name: tuple(values) for name, values in samples.items()},
            environment=self.environment,
            **size,
        )

    def in_turns(self, ways: Mapping[str, Callable[[], float]]) -> dict[str, list[float]]:
        """A sample of each way in every round, in random order. The first call of each does not count."""
        samples: dict[str, list[float]] = {name: [] for name in ways}
        for way in ways.values():
            way()
        names = list(ways)
        for _, order in zip(range(self.rounds), random_orders(len(names)), strict=False):
            for index in order:
                samples[names[index]].append(ways[names[index]]())
        return samples


def loads(bench: WaitingBench) -> Iterator[WaitingTime]:
    """Loading a folder of 2.2 GB that is in the page cache."""
    source = resolve(LOADED)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_checkpoint(source, torch.bfloat16, folder)
        load_vanilla = partial(
            AutoModelForCausalLM.from_pretrained, folder, dtype=torch.bfloat16, trust_remote_code=False
        )
        loaders = {VANILLA: load_vanilla} | {
            name: partial(init_inference, folder, **precision_of(name).options) for name in LOADED_AS
        }
        ways = {name: partial(seconds_of, load) for name, load in loaders.items()}
        for name in (VANILLA, LOADED_AS[0]):
            ways[f"{name}, and a token"] = partial(seconds_of, partial(_first_token, loaders[name]))
        yield bench.record("load", source, "bfloat16", "s", bench.in_turns(ways))


def _first_token(load: Callable[[], InferenceEngine]) -> None:
    generate(load(), tokens(1, 1), 1)


def step_attention(bench: WaitingBench) -> Iterator[WaitingTime]:
    """Attention of a step: the rate at which it reads keys and values, and the rate of the probe next to it."""
    for model, dtype, cache, contexts in (
        (SMALL, "bfloat16", None, (1000, 2000, 4000, 7000)),
        (SMALL, "float32", None, (4000,)),
        (SMALL, "float16", None, (4000,)),
        (SMALL, "bfloat16", torch.int8, (4000,)),
        ("llama-shape", "bfloat16", None, (1000, 1900)),
        ("llama-shape", "float32", None, (1900,)),
    ):
        source = resolve(model)
        engine = init_inference(source, dtype=FLOAT_DTYPES[dtype], kv_dtype=cache)
        token_bytes = engine.model_config.kv_bytes_per_token(FLOAT_DTYPES[dtype], cache)
        for context in contexts:
            turns = AttentionTurns(engine, token_bytes, context, bench.threads)
            generate(engine, tokens(1, context), TURN * (bench.rounds + 1) + 1, streamer=turns)
            label = dtype + (" with an int8 cache" if cache else "")
            yield bench.record("attention of a step", source, label, "GB/s", turns.samples(), tokens=context)


class AttentionTurns(BaseStreamer):
    """A streamer that samples the engine's attention every few steps. The first sample does not count."""

    def __init__(self, engine: InferenceEngine, token_bytes: int, context: int, threads: int) -> None:
        self._engine, self._token_bytes, self._threads = engine, token_bytes, threads
        self._context = context  # tokens in the cache
        self._steps, self._rates, self._probes = -1, list[float](), list[float]()

    def put(self, value: torch.Tensor) -> None:
        if value.ndim > 1:
            return
        self._steps += 1
        if self._steps % TURN == 0:
            self._sample()

    def _sample(self) -> None:
        times = self._engine.stage_times(reset=True)
        if self._steps:
            context = self._context + self._steps - TURN / 2
            step_ms = stage_ms(times, Phase.DECODE, Stage.ATTENTION) / TURN
            self._rates.append(context * self._token_bytes / step_ms / 1e6)
        self._probes.append(probe_bandwidth(self._threads) or float("nan"))

    def end(self) -> None:
        pass

    def samples(self) -> dict[str, list[float]]:
        pairs = zip(self._probes, self._probes[1:], strict=False)
        return {"attention": self._rates[1:], "probe": [(before + after) / 2 for before, after in pairs][1:]}


def prompt_attention(bench: WaitingBench) -> Iterator[WaitingTime]:
    """Attention of a long prompt, and the peak rate of the instruction that multiplies in this type."""
    source = resolve(SMALL)
    for dtype in ("bfloat16", "float32"):
        engine = init_inference(source, dtype=FLOAT_DTYPES[dtype])
        for prompt in (2000, 7000):
            flops = attention_flops(engine.model_config, prompt)
            rates: list[float] = []
            peaks: list[float] = []
            for _ in range(bench.rounds):
                engine.stage_times(reset=True)
                generate(engine, tokens(1, prompt), 1)
                ms = stage_ms(engine.stage_times(), Phase.PREFILL, Stage.ATTENTION)
                rates.append(flops / ms / 1e6)
                peaks.append(probe_peak(FLOAT_DTYPES[dtype], bench.threads) or float("nan"))
            samples = {"attention": rates, "probe": peaks}
            yield bench.record("attention of a prompt", source, dtype, "GFLOP/s", samples, tokens=prompt)


def attention_flops(config: ModelConfig, prompt: int) -> int:
    """Multiplications and additions of the attention of all layers over a prompt."""
    shape = layer_shape(config)
    passes = (Pass(0, tokens=prompt, window=window) for window in config.windows)
    return sum(layer_cases(shape, of)[Stage.ATTENTION].flops(1) for of in passes)


def padding(bench: WaitingBench) -> Iterator[WaitingTime]:
    """Prompts of unequal lengths as one batch, padded on the left, and one by one."""
    source = resolve(SMALL)
    for dtype in ("bfloat16", "float32"):
        engine = init_inference(source, dtype=FLOAT_DTYPES[dtype])
        prompts = [tokens(1, length) for length in PADDED]
        mask = torch.stack([(torch.arange(max(PADDED)) >= max(PADDED) - length).long() for length in PADDED])
        padded = torch.zeros_like(mask).masked_scatter(mask.bool(), torch.cat(prompts, 1)[0])
        ways = {
            "one batch": partial(seconds_of, partial(generate, engine, padded, 1, attention_mask=mask)),
            "one by one": partial(seconds_of, partial(_one_by_one, engine, prompts)),
        }
        yield bench.record("padding", source, dtype, "s", bench.in_turns(ways), batch=len(PADDED))


def _one_by_one(engine: InferenceEngine, prompts: Sequence[torch.Tensor]) -> None:
    for prompt in prompts:
        generate(engine, prompt, 1)


def choices(bench: WaitingBench) -> Iterator[WaitingTime]:
    """What a token takes outside of the kernels: preparing the step, choosing the token, passing it on."""
    source = resolve(SMALL)
    engine = init_inference(source, dtype=torch.bfloat16)
    prompt = source.tokenizer(TEXT, return_tensors="pt").input_ids if source.tokenizer else tokens(1, 12)
    for batch in (1, 8):
        ways = {
            name: partial(outside_ms, engine, prompt.repeat(batch, 1), choice, source)
            for name, choice in CHOICES.items()
            if batch == 1 or not {"streamer", "num_beams"} & set(choice)  # transformers' streamers take one sequence
        }
        yield bench.record("choice of a token", source, "bfloat16", "ms", bench.in_turns(ways), batch=batch)


def outside_ms(engine: InferenceEngine, prompt: torch.Tensor, choice: Mapping[str, Any], source: ModelSource) -> float:
    """Milliseconds of a token that pass outside of the kernels, from a long and a short generation."""
    options = dict(choice)
    if options.pop("streamer", False):
        options["streamer"] = TokenClock()
    if "stop_strings" in options:
        options["tokenizer"] = source.tokenizer
    outside = []
    for new in (SHORT, LONG):
        if "min_new_tokens" in options:
            options["min_new_tokens"] = new
        engine.stage_times(reset=True)
        seconds = seconds_of(partial(generate, engine, prompt, new, **options))
        in_kernels_ms = sum(time.total_ms for time in engine.stage_times() if time.stage != Stage.SAMPLE)
        outside.append(1e3 * seconds - in_kernels_ms)
    return (outside[1] - outside[0]) / (LONG - SHORT)


def comparisons(bench: WaitingBench, peer: bool) -> Iterator[Comparison]:
    """Long prompts against llama.cpp, and sampling against transformers, as `labkit compare` measures them."""
    for prompt in (2000, 6000):
        yield from _compared(bench, (LLAMA_CPP,) if peer else (VANILLA,), prompt=prompt)
    for batch in (1, 8):
        for sample in ("", SAMPLED):
            yield from _compared(bench, (VANILLA,), prompt=128, batch=batch, sample=sample)


def _compared(
    bench: WaitingBench, baselines: tuple[str, ...], *, prompt: int, batch: int = 1, sample: str = ""
) -> tuple[Comparison, ...]:
    case = comparison_case(
        model=SMALL, dtype="bfloat16", batch=batch, prompt=prompt, new=64, threads=bench.threads, sample=sample
    )
    with followed(case.title) as follow:
        schedule = Schedule(rounds=bench.rounds + 1, stages=False)
        return compare_with_each(baselines, FUSED, case, schedule, progress=follow)


def tokens(batch: int, length: int) -> torch.Tensor:
    """Tokens of a prompt, the same in every run."""
    return torch.randint(5, 30_000, (batch, length), generator=torch.Generator().manual_seed(0))


def generate(engine: InferenceEngine, prompt: torch.Tensor, new: int, **options: Any) -> torch.Tensor:
    """Generates `new` tokens, greedily unless the options say otherwise, past any end of the text."""
    settings = {"attention_mask": torch.ones_like(prompt), "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    output: torch.Tensor = engine.generate(prompt, max_new_tokens=new, **(settings | options))
    return output


def seconds_of(call: Callable[[], object]) -> float:
    """Seconds of a call. What it returns is freed after the clock has stopped."""
    began = perf_counter()
    result = call()
    seconds = perf_counter() - began
    del result
    return seconds


def stage_ms(times: Sequence[StageTime], phase: Phase, stage: Stage) -> float:
    """Milliseconds of a stage of all layers."""
    return sum(time.total_ms for time in times if time.phase == phase and time.stage == stage)
