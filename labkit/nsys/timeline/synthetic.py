"""Synthetic traces of a decoding model, with any number of events and known relations. Nothing is profiled."""

from __future__ import annotations

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from labkit.nsys.trace import Source, Trace, typed
from labkit.stages import Phase, Stage, message, step_message
from labkit.system.rounding import ceil_div

STAGES_OF_A_LAYER = (Stage.QKV, Stage.ATTENTION, Stage.ATTN_OUT, Stage.MLP, Stage.MLP_OUT, Stage.RESIDUAL)
KERNELS = {
    Stage.EMBED: "void at::native::indexSelectLargeIndex<c10::Half, long, unsigned int, 2, 2, -2, true>(...)",
    Stage.QKV: "sm80_xmma_gemm_f16f16_f16f32_f32_tn_n_tilesize64x64x64_stage4_warpsize2x2x1_tensor16x8x16_kernel",
    Stage.ATTENTION: "void labkit::decode_attention<__half, 64>(labkit::DecodeArgs)",
    Stage.ATTN_OUT: "void gemv2T_kernel_val<int, int, __half, __half, __half, float, 128, 16, 4, 4, false>(...)",
    Stage.MLP: "void cutlass::Kernel2<cutlass_80_wmma_tensorop_f16_s161616gemm_f16_32x32_128x2_tn_align8>(...)",
    Stage.MLP_OUT: "void gemv2T_kernel_val<int, int, __half, __half, __half, float, 128, 16, 4, 4, false>(...)",
    Stage.RESIDUAL: "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<c10::Half>>(...)",
    Stage.LM_HEAD: "ampere_fp16_s16816gemm_fp16_64x64_sliced1x2_ldg8_f2f_stages_64x5_tn",
    Stage.SAMPLE: "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::ArgMaxOps>>(...)",
}
KERNEL_NAMES = list(dict.fromkeys(KERNELS.values()))
LAUNCH_US, LATENCY_US, BETWEEN_US = 4.0, 3.0, 1.5


def decode_trace(
    *,
    steps: int = 4,
    layers: int = 12,
    kernels_per_stage: int = 2,
    kernel_us: float = 3.0,
    ranks: int = 1,
    seed: int = 0,
) -> Trace:
    """Decode steps of a model on one GPU per rank: ranges, launches, and kernels that start in the order launched."""
    frames = [
        _rank(rank, steps, layers, kernels_per_stage, kernel_us, np.random.default_rng([seed, rank]))
        for rank in range(ranks)
    ]
    pids = 4000 + np.arange(ranks)
    processes = typed("processes", {"pid": pids, "rank": np.arange(ranks), "name": "python"})
    threads = typed("threads", {"process": np.arange(ranks), "tid": pids, "name": "MainThread"})
    joined = {name: _joined([of_rank[name] for of_rank in frames]) for name in ("ranges", "operations", "calls")}
    return Trace(Source("synthetic", "", ()), **joined, processes=processes, threads=threads)


def trace_of(events: int, *, layers: int = 12, kernels_per_stage: int = 2, seed: int = 0) -> Trace:
    """A trace of whole decode steps with at least this number of events."""
    stages = 3 + layers * len(STAGES_OF_A_LAYER)
    a_step = 1 + stages + 2 * stages * kernels_per_stage
    steps = ceil_div(events - 1, a_step)
    return decode_trace(steps=steps, layers=layers, kernels_per_stage=kernels_per_stage, seed=seed)


def _rank(
    rank: int, steps: int, layers: int, per_stage: int, kernel_us: float, random: np.random.Generator
) -> dict[str, pd.DataFrame]:
    labels: list[tuple[Stage, int | None]] = [(Stage.EMBED, None)]
    labels += [(stage, layer) for layer in range(layers) for stage in STAGES_OF_A_LAYER]
    labels += [(Stage.LM_HEAD, None), (Stage.SAMPLE, None)]
    launches = steps * len(labels) * per_stage
    gaps_us = random.lognormal(np.log(LAUNCH_US), 0.3, launches) + BETWEEN_US
    call_end = np.cumsum((gaps_us * 1e3).astype(np.int64)) + 20_000
    call_start = call_end - (random.uniform(0.5, 0.9, launches) * LAUNCH_US * 1e3).astype(np.int64).clip(max=4_000)
    call_start = np.maximum(call_start, np.concatenate([[0], call_end[:-1] + 200]))

    stage_first = call_start.reshape(-1, per_stage)[:, 0] - 150
    stage_last = call_end.reshape(-1, per_stage)[:, -1] + 40
    step_first = stage_first.reshape(steps, -1)[:, 0] - 5
    step_last = stage_last.reshape(steps, -1)[:, -1] + 5

    names = [Phase.DECODE.value, step_message(Phase.DECODE)]
    names += [message(Phase.DECODE, stage, layer) for stage, layer in labels]
    codes = np.concatenate([[0], np.ones(steps, int), np.tile(np.arange(len(labels)) + 2, steps)])
    starts = np.concatenate([[step_first[0] - 5], step_first, stage_first])
    ends = np.concatenate([[step_last[-1] + 5], step_last, stage_last])
    order = np.argsort(starts, kind="stable")
    ranges = {
        "range_id": np.arange(len(starts)) + 1,
        "start_ns": starts[order],
        "end_ns": ends[order],
        "process": rank,
        "tid": 4000 + rank,
        "domain": "labkit",
        "name": pd.Categorical.from_codes(codes[order], names),
        "style": "PushPop",
    }
    calls = {
        "start_ns": call_start,
        "end_ns": call_end,
        "process": rank,
        "tid": 4000 + rank,
        "kind": "api",
        "name": "cudaLaunchKernel",
        "correlation": np.arange(launches) + 1,
    }
    of_stage = np.array([KERNEL_NAMES.index(KERNELS[stage]) for stage, _ in labels])
    kernel = np.tile(np.repeat(of_stage, per_stage), steps)
    return {
        "ranges": typed("ranges", ranges),
        "operations": _operations(rank, kernel, call_end, kernel_us, random),
        "calls": typed("calls", calls),
    }


def _operations(
    rank: int, kernel: NDArray[np.int64], call_end: NDArray[np.int64], kernel_us: float, random: np.random.Generator
) -> pd.DataFrame:
    """A kernel for each launch; the kernels run one after the other."""
    launches = len(call_end)
    duration = (random.lognormal(np.log(kernel_us), 0.5, launches) * 1e3).astype(np.int64) + 800
    done = np.cumsum(duration)
    ready = call_end + int(LATENCY_US * 1e3)
    kernel_start = np.maximum.accumulate(ready - (done - duration)) + (done - duration)
    operations = {
        "start_ns": kernel_start,
        "end_ns": kernel_start + duration,
        "process": rank,
        "kind": "kernel",
        "name": pd.Categorical.from_codes(kernel, KERNEL_NAMES),
        "device": rank,
        "stream": 7,
        "correlation": np.arange(launches) + 1,
        "grid": "108 x 1 x 1",
        "block": "128 x 1 x 1",
        "registers": 64,
        "shared_bytes": 16_384,
    }
    return typed("operations", operations)


def _joined(frames: list[pd.DataFrame]) -> pd.DataFrame:
    if len(frames) == 1:
        return frames[0]
    return pd.concat(frames, ignore_index=True).sort_values("start_ns", kind="stable", ignore_index=True)
