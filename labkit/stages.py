"""The names of what a model step does, and the ranges that announce them to profilers.

Ranges cost nothing unless somebody listens: Nsight Systems (or another NVTX tool) or torch.profiler. No torch at
import.
"""

import contextlib
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from typing import Any

import nvtx

DOMAIN = "labkit"
INJECTED = ("NVTX_INJECTION64_PATH", "NVTX_INJECTION32_PATH", "NSYS_PROFILING_SESSION_ID")  # set by the tools
SILENCE = contextlib.nullcontext()


class Stage(StrEnum):
    """The stages of a step; QKV, ATTENTION, MLP and RESIDUAL are the four Deep-Fusion regions.

    On a GPU one kernel may be two stages of a layer whose attention and MLP start from the same rows.
    """

    EMBED = "embed"
    QKV = "qkv"
    ATTENTION = "attention"
    ATTN_OUT = "attn_out"
    MLP = "mlp"
    MLP_OUT = "mlp_out"
    RESIDUAL = "residual"
    QKV_MLP = "qkv+mlp"
    OUTPUTS = "attn_out+mlp_out"
    ALL_REDUCE = "all_reduce"
    LM_HEAD = "lm_head"
    SAMPLE = "sample"


FUSED_REGIONS = (Stage.QKV, Stage.ATTENTION, Stage.MLP, Stage.RESIDUAL)  # the four of Deep-Fusion


class Phase(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"


def message(phase: Phase, stage: Stage, layer: int | None = None) -> str:
    """The range's name, as profilers show it: "decode/layer.3/qkv", "prefill/lm_head"."""
    return f"{phase}/{stage}" if layer is None else f"{phase}/layer.{layer}/{stage}"


@cache
def nvtx_listening() -> bool:
    """True in a process that an NVTX tool (nsys profile, ncu) was injected into, which happens when it starts."""
    return any(name in os.environ for name in INJECTED)


def torch_profiler_listening() -> bool:
    """True inside torch.profiler (or the older autograd profiler)."""
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.autograd._profiler_enabled())


def listening() -> bool:
    """Whether a profiler would see a range opened now."""
    return nvtx_listening() or torch_profiler_listening()


@dataclass(frozen=True)
class OpenRange:
    """A range that `start` opened; `stop` closes it for those that were listening then."""

    nvtx: bool
    record: Any  # torch.profiler's record_function, or None


def stage(phase: Phase, stage: Stage, layer: int | None = None) -> contextlib.AbstractContextManager[None]:
    """A range around the block for every profiler that listens."""
    return _range(message(phase, stage, layer)) if listening() else SILENCE


@contextlib.contextmanager
def _range(text: str) -> Iterator[None]:
    opened = start(text)
    try:
        yield
    finally:
        stop(opened)


def start(text: str) -> OpenRange:
    """Opens a range; for hooks, where a `with` block can't be placed. Ranges must nest."""
    on_nvtx = nvtx_listening()
    if on_nvtx:
        nvtx.push_range(text, domain=DOMAIN)
    record = None
    if torch_profiler_listening():
        import torch

        record = torch.autograd.profiler.record_function(text)
        record.__enter__()
    return OpenRange(on_nvtx, record)


def stop(opened: OpenRange) -> None:
    """Closes the range that `start` opened."""
    if opened.record is not None:
        opened.record.__exit__(None, None, None)
    if opened.nvtx:
        nvtx.pop_range(domain=DOMAIN)
