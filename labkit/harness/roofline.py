"""The physical limit: a step reads every weight once and multiplies it with every row. It takes at least bytes / read
bandwidth, and at least FLOPs / the processor's peak rate.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import median

import numpy as np
import torch

from labkit.harness.frozen_record import FrozenRecord
from labkit.harness.kept_rate import keep_rate
from labkit.harness.stored_weights import StoredWeights, Weights
from labkit.kernels import gpu
from labkit.kernels.build import unavailable
from labkit.kernels.decode_step.cases import HeadCase, StepCase
from labkit.kernels.gpu import CPU
from labkit.kernels.layer_ops import Pass, layer_cases
from labkit.kernels.probe import Way, fastest_of, peak_gflop_s, rates_now_gb_s, read_bandwidth_gb_s
from labkit.kernels.shapes import ExpertsShape, LayerShape, ModelShape, OpCase, Sizes
from labkit.kernels.types import Heads
from labkit.models.config import ExpertsSpec, ModelConfig
from labkit.stages import Stage

PROBE_SECONDS = 0.05
ONLY_WAY = Way(reading=0, streams=1)  # to read the memory of a GPU
Rates = Mapping[Way, float]  # GB/s by way to read; empty: no probe
NUMBERS = Sizes(matrix=1, vector=0, cache=0, scale=0)  # with these sizes, bytes count the numbers in the matrices


class Work(FrozenRecord):
    """The least work of one generation of a case, counted from the model's shape."""

    decode_bytes: float  # of one decode step, averaged over the contexts of the run's steps
    decode_flops: float  # of one decode step, the same average
    prefill_flops: float
    weight_bytes: int
    kv_bytes: int
    bytes_per_token: float = 0.0  # that a decode step reads for each token of its contexts, for all sequences

    def floor_ms(self, bandwidth_gb_s: float, peak_gflop_s: float | None = None, further_tokens: float = 0.0) -> float:
        """The least time of a decode step at this read bandwidth, and at this peak rate where it is known. Its context
        is `further_tokens` longer than that of the average step.
        """
        reading = (self.decode_bytes + further_tokens * self.bytes_per_token) / bandwidth_gb_s / 1e6
        return max(reading, self.decode_flops / peak_gflop_s / 1e6) if peak_gflop_s else reading

    def prompt_floor_ms(self, bandwidth_gb_s: float, peak_gflop_s: float) -> float:
        """The least time to the first token: the longer of multiplying the prompt and reading `decode_bytes`.

        These bytes stand for the weights, which the prompt's pass reads once, too. They also hold the KV cache that an
        average decode step reads.
        """
        return max(self.prefill_flops / peak_gflop_s, self.decode_bytes / bandwidth_gb_s) / 1e6


def count_work(
    config: ModelConfig, weights: Weights, batch: int, prompt: int, new: int, kv_dtype: torch.dtype | None = None
) -> Work:
    """The work of `new` greedy tokens after `prompt` tokens, for `batch` sequences. kv_dtype: as in `init_inference`.

    The prompt's pass yields the first token. The step for token i + 1 attends to the prompt and i new tokens.
    """
    contexts = range(prompt + 1, prompt + max(new, 2))
    step_bytes = [decode_bytes(config, weights, batch, context, kv_dtype) for context in contexts]
    return Work(
        decode_bytes=float(np.mean(step_bytes)),
        decode_flops=float(np.mean([decode_flops(config, batch, context) for context in contexts])),
        prefill_flops=prefill_flops(config, batch, prompt),
        weight_bytes=_weight_bytes(config, weights),
        kv_bytes=batch * (prompt + new) * config.kv_bytes_per_token(_computes(weights), kv_dtype),
        bytes_per_token=(step_bytes[-1] - step_bytes[0]) / max(1, len(step_bytes) - 1),
    )


def decode_bytes(
    config: ModelConfig, weights: Weights, batch: int, context: int, kv_dtype: torch.dtype | None = None
) -> int:
    """Bytes that one decode step must read: each weight of a multiplication once, and the KV cache.

    `context`: tokens that each of the `batch` sequences attends to, with the new one. A layer with a window reads only
    its window. The limit holds for every side, also for vanilla models, so norms and biases count in the model's type,
    although the fused ops keep them in float32. With int8 weights the head is int8 too, and the cache is bfloat16
    unless `kv_dtype` says otherwise. `StoredWeights` count with their bits; their vectors and cache have the type in
    which they compute.
    """
    dtype, shape = _computes(weights), model_shape(config)
    step, sizes = StepCase(shape, past=context - 1), Sizes.of(dtype, vectors=dtype, kv_dtype=kv_dtype)
    if isinstance(weights, torch.dtype):
        return step.bytes(batch, sizes)
    head = HeadCase(shape).bytes(batch, NUMBERS)
    matrices = (step.bytes(batch, NUMBERS) - head) * weights.bits + head * weights.head_bits
    return round(matrices / 8) + step.bytes(batch, replace(sizes, matrix=0, scale=0))


def decode_flops(config: ModelConfig, batch: int, context: int) -> int:
    """Multiplications and additions of one decode step in which each sequence attends to `context` tokens."""
    return StepCase(model_shape(config), past=context - 1).flops(batch)


def prefill_flops(config: ModelConfig, batch: int, prompt: int) -> int:
    """Multiplications and additions of `prompt` tokens per sequence, with logits for the last one only."""
    return StepCase(model_shape(config), past=0, tokens=prompt).flops(batch)


def region_bytes(config: ModelConfig, region: Stage, dtype: torch.dtype, batch: int, context: int) -> int:
    """Bytes that a region must read from memory: its weights once, and for attention the KV cache.

    A layer with a window reads only its window.
    """
    sizes = Sizes.of(dtype)
    return sum(case.bytes(batch, sizes) for case in _in_each_layer(config, region, context)) // config.num_layers


def region_flops(config: ModelConfig, region: Stage, batch: int, context: int) -> int:
    """Multiplications and additions in a region's products."""
    return sum(case.flops(batch) for case in _in_each_layer(config, region, context)) // config.num_layers


def probe_peak(weights: Weights, threads: int, device: torch.device = CPU) -> float | None:
    """Peak GFLOP/s (multiplications and additions) of `threads` threads with the instruction that computes prompts in
    this weight type. None on a GPU, and where the probe cannot be compiled.
    """
    return None if device.type != "cpu" or unavailable() else peak_gflop_s(_computes(weights), threads)


def probe_bandwidth(threads: int, device: torch.device = CPU) -> float | None:
    """GB/s that `threads` threads read from memory now, or that the current GPU reads from its own memory. None where
    the probe cannot be compiled, and for other kinds of devices. A CPU's rate is kept, see `kept_rate`.
    """
    if device.type == "cpu":
        if unavailable():
            return None
        rate = read_bandwidth_gb_s(threads, PROBE_SECONDS)
        keep_rate(rate, threads)
        return rate
    if device.type != "cuda" or gpu.unavailable() or gpu.interpreted():
        return None
    from labkit.kernels import gpu_probe

    return gpu_probe.read_bandwidth_gb_s(PROBE_SECONDS)


def probe_turn(threads: int, device: torch.device = CPU) -> Rates:
    """As `probe_bandwidth`, in a short turn beside turns of a few tokens, with the rate of each of the best ways."""
    if device.type == "cpu":
        return {} if unavailable() else rates_now_gb_s(threads)
    rate = probe_bandwidth(threads, device)
    return {} if rate is None else {ONLY_WAY: rate}


def rates_of_epoch(turns: Sequence[Rates], threads: int) -> list[float | None]:
    """Read bandwidth in each turn of an epoch, by the way that was the fastest over the whole epoch. The fastest one of
    each turn would be the one that chance favours, and one way for all epochs is not the fastest at all times.
    """
    if not all(turns):
        return [None] * len(turns)
    fastest = fastest_of(turns, threads)
    if len(turns[0]) > 1:  # of a CPU
        keep_rate(median(rates[fastest] for rates in turns), threads)
    return [rates[fastest] for rates in turns]


def layer_shape(config: ModelConfig) -> LayerShape:
    """Shape of a layer of the model, under the name of its architecture."""
    return LayerShape(
        model=config.architecture,
        hidden=config.hidden_size,
        heads=Heads(config.num_heads, config.num_kv_heads, config.head_dim),
        intermediate=config.intermediate_size,
        vocabulary=config.vocab_size,
        norm=config.norm,
        activation=config.activation,
        gated=config.gated,
        rotary=config.rotary.dim if config.rotary else 0,
        interleaved=config.rotary is not None and config.rotary.interleaved,
        alibi=config.position == "alibi",
        biases=config.biases,
        sinks=config.attention_sinks,
        parallel=config.parallel_residual,
        shared_norm=config.shared_norm,
        qk_norm=config.qk_norm,
        qk_norm_whole=config.qk_norm_whole,
        output_norms=config.output_norms,
        experts=None if (mixture := config.experts) is None else _experts_shape(mixture),
    )


def _experts_shape(mixture: ExpertsSpec) -> ExpertsShape:
    return ExpertsShape(mixture.count, mixture.chosen, mixture.shared, mixture.shared_gate)


def model_shape(config: ModelConfig) -> ModelShape:
    """Shape of the whole model."""
    return ModelShape(
        layer=layer_shape(config),
        windows=config.windows,
        embedding=config.embedding_size,
        learned_positions=config.position == "learned",
        embedding_norm=config.embedding_norm,
        final_norm=config.final_norm,
        dense_layers=config.dense_layers,
        dense_size=config.dense_size,
    )


def _in_each_layer(config: ModelConfig, region: Stage, context: int) -> Iterator[OpCase]:
    """The region in each layer that has it."""
    layers = (layer_cases(shape, Pass(context, window=window)) for shape, window in model_shape(config).layers())
    return (cases[region] for cases in layers if region in cases)


def _computes(weights: Weights) -> torch.dtype:
    return weights.dtype if isinstance(weights, StoredWeights) else weights


def _weight_bytes(config: ModelConfig, weights: Weights) -> int:
    """Bytes of all weights. A tied head counts once. Matrices outside of the layers count with the head's bits."""
    if isinstance(weights, torch.dtype):
        return config.weight_bytes(weights)
    if weights.bytes is not None:
        return weights.bytes
    outside = sum(math.prod(shape) for shape in config.top_shapes().values())
    layers = config.weight_bytes(torch.int8) - outside
    return round((layers * weights.bits + outside * weights.head_bits) / 8)
