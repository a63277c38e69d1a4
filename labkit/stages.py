"""The names of the stages of a model step, and the ranges that announce them to profilers.

Ranges cost nothing unless a profiler listens: Nsight Systems (or another NVTX tool) or torch.profiler. The import of
this module does not load torch.
"""

import atexit
import contextlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import cache, lru_cache
from time import perf_counter_ns
from typing import Any

from labkit.system.nvtx_ranges import DOMAIN as DOMAIN
from labkit.system.nvtx_ranges import pop, push

STEP_TIMES = "LABKIT_STEP_TIMES"  # names a file to which the process writes the times of its steps when it ends
INJECTED = ("NVTX_INJECTION64_PATH", "NVTX_INJECTION32_PATH", "NSYS_PROFILING_SESSION_ID")  # set by the tools
SILENCE = contextlib.nullcontext()
MESSAGE = re.compile(r"(?P<phase>prefill|decode)(/layer\.(?P<layer>\d+))?(/(?P<stage>[a-z_+]+))?")


class Stage(StrEnum):
    """The stages of a step. QKV, ATTENTION, MLP and RESIDUAL are the four Deep-Fusion regions. FETCH is the wait for
    the weights of an offloaded layer, FETCH_KV the wait for its keys and values. RECV is the wait for the result of the
    rank with the previous layers, SEND the transfer to the rank with the next layers.

    A mixture of experts has ROUTE, the choice of experts, and EXPERTS, their MLPs. MLP and MLP_OUT of such a layer are
    an expert that every row passes.

    On a GPU one kernel may cover two stages of a layer whose attention and MLP start from the same rows (QKV_MLP,
    OUTPUTS).
    """

    EMBED = "embed"
    FETCH = "fetch"
    FETCH_KV = "fetch_kv"
    QKV = "qkv"
    ATTENTION = "attention"
    ATTN_OUT = "attn_out"
    MLP = "mlp"
    MLP_OUT = "mlp_out"
    ROUTE = "route"
    EXPERTS = "experts"
    RESIDUAL = "residual"
    QKV_MLP = "qkv+mlp"
    OUTPUTS = "attn_out+mlp_out"
    ALL_REDUCE = "all_reduce"
    LM_HEAD = "lm_head"
    SAMPLE = "sample"
    RECV = "recv"
    SEND = "send"


OUTSIDE = "outside"  # the time of a step that no stage covers: host code between two steps
EXCHANGES = (Stage.ALL_REDUCE, Stage.RECV, Stage.SEND)  # the stages between ranks
STAGES = frozenset(stage.value for stage in Stage)
FUSED_REGIONS = (Stage.QKV, Stage.ATTENTION, Stage.MLP, Stage.RESIDUAL)  # the four regions of Deep-Fusion


class Phase(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"


STEP = "step"


@dataclass(frozen=True)
class Label:
    """The content of a range's message."""

    phase: Phase
    stage: Stage | None = None  # None: a whole step, or all steps of a phase
    layer: int | None = None
    step: bool = False  # without a stage: one step, instead of all steps of a phase


def phase_of(past: int, tokens: int) -> Phase:
    """The phase of running `tokens` after `past` tokens: DECODE for a single token after others."""
    return Phase.DECODE if past and tokens == 1 else Phase.PREFILL


@lru_cache(maxsize=4096)
def message(phase: Phase, stage: Stage, layer: int | None = None) -> str:
    """The range's name in profilers: "decode/layer.3/qkv", "prefill/lm_head"."""
    return f"{phase}/{stage}" if layer is None else f"{phase}/layer.{layer}/{stage}"


def step_message(phase: Phase) -> str:
    """The range around one step, from the embedding to the choice of a token: "decode/step"."""
    return f"{phase}/{STEP}"


@lru_cache(maxsize=4096)
def parse(text: str) -> Label | None:
    """The label of a message of the domain `labkit`; None for any other text."""
    match = MESSAGE.fullmatch(text)
    if match is None:
        return None
    phase, layer, stage = Phase(match["phase"]), match["layer"], match["stage"]
    if layer is None and stage in (None, STEP):
        return Label(phase, step=stage == STEP)
    return Label(phase, Stage(stage), int(layer) if layer else None) if stage in STAGES else None


@cache
def nvtx_listening() -> bool:
    """Whether an NVTX tool (nsys profile, ncu) was injected into this process when it started."""
    return any(name in os.environ for name in INJECTED)


def note_fork() -> None:
    """Records in the file named by LABKIT_STEP_TIMES that no profiler sees the ranges of this process."""
    if path := os.environ.get(STEP_TIMES):
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps({"forked": os.getpid()}) + "\n")


@cache
def _note_if_forked(pid: int) -> None:
    """Calls `note_fork` if this process, `pid`, was forked after the import of this module."""
    if pid != _IMPORTED_BY:
        note_fork()


_IMPORTED_BY = os.getpid()


def torch_profiler_listening() -> bool:
    """Whether torch.profiler (or the older autograd profiler) is active."""
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.autograd._profiler_enabled())


def listening() -> bool:
    """Whether a profiler would see a range opened now."""
    return not _unwatched and (nvtx_listening() or torch_profiler_listening())


_unwatched = False


@contextlib.contextmanager
def unwatched() -> Iterator[None]:
    """Inside this context no range is announced, no step is timed, and no profiler is looked for.

    For warm-up runs before a profile, and for measuring the cost of the announcements.
    """
    global _unwatched
    before, _unwatched = _unwatched, True
    try:
        yield
    finally:
        _unwatched = before


PhaseWatcher = Callable[[Phase, bool], None]
PHASE_WATCHERS: list[PhaseWatcher] = []  # called just before the range of a phase begins (True), and after its end


class Range:
    """A range for every profiler that listens when it opens. It is a context, with open and close for hooks. Ranges
    nest.
    """

    __slots__ = ("_nvtx", "_record", "_text")

    def __init__(self, text: str) -> None:
        self._text = text
        self._nvtx = False
        self._record: Any = None  # torch.profiler's record_function

    def open(self) -> "Range":
        if _unwatched:
            return self
        if nvtx_listening():
            _note_if_forked(os.getpid())
            push(self._text)
            self._nvtx = True
        if torch_profiler_listening():
            import torch

            self._record = torch.autograd.profiler.record_function(self._text)
            self._record.__enter__()
        return self

    def close(self) -> None:
        """Closes the range in the profilers that listened when it opened."""
        if self._record is not None:
            self._record.__exit__(None, None, None)
        if self._nvtx:
            pop()

    __enter__ = open

    def __exit__(self, *error: object) -> None:
        self.close()


def stage(phase: Phase, stage: Stage, layer: int | None = None) -> contextlib.AbstractContextManager[Any]:
    """A range around the block for every profiler that listens."""
    return Range(message(phase, stage, layer)) if listening() else SILENCE


@cache
def _step_times() -> dict[Phase, list[float]] | None:
    """Milliseconds of this process's steps by phase; None unless LABKIT_STEP_TIMES is set."""
    path = os.environ.get(STEP_TIMES)
    if not path:
        return None
    times: dict[Phase, list[float]] = {phase: [] for phase in Phase}

    def write() -> None:
        if os.getpid() != _IMPORTED_BY:  # a fork has its parent's times, and no profiler sees its ranges
            return
        with open(path, "a", encoding="utf-8") as file:
            file.writelines(json.dumps({"phase": phase, "step_ms": ms}) + "\n" for phase, ms in times.items() if ms)

    atexit.register(write)
    return times


class StepRanges:
    """The ranges around steps and phases: "decode" around consecutive steps of a phase, "decode/step" around each step.

    If LABKIT_STEP_TIMES names a file, the milliseconds of every step are written to it when the process ends, one JSON
    line per phase. So a profiled run can be compared with an unprofiled one without a profiler's own clock.
    """

    def __init__(self) -> None:
        self._phase: Phase | None = None
        self._open: list[Range] = []  # the range of the phase, then the range of the step
        self._since_ns = 0

    def begin(self, phase: Phase) -> None:
        """Starts a step, and ends the step before it."""
        if not self._open and (_unwatched or not (listening() or PHASE_WATCHERS or _step_times() is not None)):
            return
        self._end_step()
        if phase != self._phase:
            self.end()
            self._phase = phase
            for watch in () if _unwatched else PHASE_WATCHERS:
                watch(phase, True)
            self._open.append(Range(phase.value).open())
        self._open.append(Range(step_message(phase)).open())
        self._since_ns = perf_counter_ns()

    def end(self) -> None:
        """Ends the last step, if there was one, and its phase."""
        self._end_step()
        if self._phase is None:
            return
        self._open.pop().close()
        ended, self._phase = self._phase, None
        for watch in () if _unwatched else PHASE_WATCHERS:
            watch(ended, False)

    def _end_step(self) -> None:
        if len(self._open) == 2:
            assert self._phase is not None
            if not _unwatched and (times := _step_times()) is not None:
                times[self._phase].append((perf_counter_ns() - self._since_ns) / 1e6)
            self._open.pop().close()

    def __enter__(self) -> "StepRanges":
        return self

    def __exit__(self, *error: object) -> None:
        self.end()
