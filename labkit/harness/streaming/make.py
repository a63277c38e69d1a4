"""Makes a plan from a model and a memory budget: sizes are counted, rates are probed or given."""

from __future__ import annotations

import math
import os
from pathlib import Path

from labkit.engine.offload.footprint import Footprint
from labkit.engine.offload.prepared import folder_for
from labkit.engine.team_size import team_size
from labkit.harness.compare.plan import check_positions
from labkit.harness.disk import folder_rate_gb_s
from labkit.harness.environment import read_environment
from labkit.harness.roofline import decode_flops, prefill_flops, probe_bandwidth
from labkit.harness.streaming.plan import StreamingPlan, StreamRates, StreamWork
from labkit.harness.streaming.records import StreamCase
from labkit.kernels.build import BuildError, unavailable
from labkit.kernels.probe import peak_gflop_s
from labkit.kernels.types import float_dtype
from labkit.system.asked_from import setting
from labkit.system.bounds import check_number, check_numbers
from labkit.system.errors import UnsupportedError, UserError
from labkit.system.output_folder import check_output_folder
from labkit.weights.precision import STORED, precision_of
from labkit.weights.quantise import LAYER, Quantization, check_schemes, stored_bytes
from labkit.weights.resolve import resolve
from labkit.weights.spec import WeightSpec


def plan_streaming(
    model: str,
    *,
    memory_gb: float,
    precision: str = "bfloat16",
    prompt: int = 128,
    new: int = 32,
    slots: int = 3,
    threads: int | None = None,
    path: str | os.PathLike[str] | None = None,
    disk_gb_s: float | None = None,
    gflop_s: float | None = None,
    seed: int = 0,
) -> StreamingPlan:
    """Plans the batch for `model` in `memory_gb` GB (1e9 bytes), with `prompt` prompt tokens and `new` new tokens.

    precision: a name of `labkit.weights.precision`.
    slots: as for `init_inference(offload=…)`.
    threads: None: the engine's own number (`team_size`).
    path: the folder from which layers would be streamed; its disk is probed. None: labkit's own cache folder.
    disk_gb_s, gflop_s: rates of another machine, instead of probing this one. The plan then ignores the memory's
    bandwidth.

    Nothing is loaded. UserError for an unknown model or precision, impossible sizes, too little memory, and an
    unwritable folder.
    """
    known = precision_of(precision)
    if known.dtype is None:
        raise UserError(
            f"got precision {STORED!r}, whose bytes only its file knows; expected another, such as 'bfloat16'"
        )
    for name, count in (("new", new), ("slots", slots)):
        check_number(name, count, least=2)
    check_numbers(prompt=prompt, threads=threads, seed=seed)
    check_numbers(memory_gb=memory_gb, disk_gb_s=disk_gb_s, gflop_s=gflop_s)
    if reason := unavailable():
        raise BuildError(reason)
    threads = team_size() if threads is None else threads
    source = resolve(model, seed=seed)
    spec = WeightSpec.of(source.hf_config, known.dtype, quant=Quantization.model_validate(known.quant or {}))
    check_positions(spec.config, prompt, new)
    footprint = _footprint(spec)
    footprint.for_weights(memory_gb * 1e9, 1, prompt, prompt + new, slots)  # UserError where not even one sequence fits
    has_given_rates = disk_gb_s is not None or gflop_s is not None
    rates = StreamRates(
        disk_gb_s=folder_rate_gb_s(writable_folder(path)) if disk_gb_s is None else disk_gb_s,
        gflop_s=peak_gflop_s(spec.dtype, threads) if gflop_s is None else gflop_s,
        memory_gb_s=None if has_given_rates else probe_bandwidth(threads),
    )
    return StreamingPlan(
        case=StreamCase(
            model=model,
            origin=source.origin,
            precision=precision,
            memory_gb=memory_gb,
            prompt_tokens=prompt,
            new_tokens=new,
            slots=slots,
            threads=threads,
        ),
        environment=read_environment(threads),
        footprint=footprint,
        work=_work(spec, footprint, prompt, new),
        rates=rates,
    )


def _footprint(spec: WeightSpec) -> Footprint:
    if not spec.config.causal:
        raise UserError(f"got {spec.config.architecture}, an encoder, which generates nothing; expected a decoder")
    if spec.config.dense_layers:
        raise UnsupportedError("plans are of models with layers of one kind, and only some of its layers have experts")
    if spec.quantised:
        check_schemes(spec.part, spec.quant)
    return Footprint.of(spec)


def _work(spec: WeightSpec, footprint: Footprint, prompt: int, new: int) -> StreamWork:
    config, itemsize = spec.config, float_dtype(spec.dtype).itemsize
    looked_up = 0 if config.tied_head else config.vocab_size * config.embedding_size * itemsize
    return StreamWork(
        bytes_per_weight=bytes_per_weight(spec),
        weight_bytes=footprint.weights - looked_up,
        flops=decode_flops(config, 1, prompt + new // 2),
        prompt_flops=prefill_flops(config, 1, prompt),
    )


def bytes_per_weight(spec: WeightSpec) -> float:
    """Average bytes of a number in the layers' matrices with its share of the scales."""
    layers = map(spec.config.layer_shapes, range(spec.config.num_layers))
    matrices = [(name, shape) for shapes in layers for name, shape in shapes.items() if name in LAYER]
    stored = sum(stored_bytes(shape, spec.dtype, spec.scheme(name)) for name, shape in matrices)
    return stored / sum(math.prod(shape) for _, shape in matrices)


def writable_folder(path: str | os.PathLike[str] | None) -> Path:
    """The folder for packed weights, made if needed: `path`, or labkit's own. UserError if it is not writable."""
    return check_output_folder(folder_for(path), what="streamed weights", option=setting("path"))
