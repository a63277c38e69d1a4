"""The names of what a model step does, and the ranges that announce them to profilers.

Ranges cost nothing unless somebody listens: Nsight Systems (or another NVTX tool) or torch.profiler. No torch at
import.
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

STEP_TIMES = "LABKIT_STEP_TIMES"  # names a file that gets the times of the steps when the process ends
INJECTED = ("NVTX_INJECTION64_PATH", "NVTX_INJECTION32_PATH", "NSYS_PROFILING_SESSION_ID")  # set by the tools
SILENCE = contextlib.nullcontext()
MESSAGE = re.compile(r"(?P<phase>prefill|decode)(/layer\.(?P<layer>\d+))?(/(?P<stage>[a-z_+]+))?")


class Stage(StrEnum):
    """The stages of a step; QKV, ATTENTION, MLP and RESIDUAL are the four Deep-Fusion regions. FETCH is the wait for
    the weights of a layer that is read from a file, FETCH_KV for its keys and values. RECV is the wait for what the
    rank with the layers before sends, SEND what goes to the rank with the next ones.

    On a GPU one kernel may be two stages of a layer whose attention and MLP start from the same rows.
    """

    EMBED = "embed"
    FETCH = "fetch"
    FETCH_KV = "fetch_kv"
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
    RECV = "recv"
    SEND = "send"


EXCHANGES = (Stage.ALL_REDUCE, Stage.RECV, Stage.SEND)  # what a step spends between ranks
STAGES = frozenset(stage.value for stage in Stage)
FUSED_REGIONS = (Stage.QKV, Stage.ATTENTION, Stage.MLP, Stage.RESIDUAL)  # the four of Deep-Fusion


class Phase(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"


STEP = "step"


@dataclass(frozen=True)
class Label:
    """What a range's message says. `stage` None: a whole step, or with `step` False all steps of a phase."""

    phase: Phase
    stage: Stage | None = None
    layer: int | None = None
    step: bool = False


def phase_of(past: int, tokens: int) -> Phase:
    """What it is to run `tokens` on top of `past` ones: DECODE for a single one on top of others."""
    return Phase.DECODE if past and tokens == 1 else Phase.PREFILL


@lru_cache(maxsize=4096)
def message(phase: Phase, stage: Stage, layer: int | None = None) -> str:
    """The range's name, as profilers show it: "decode/layer.3/qkv", "prefill/lm_head"."""
    return f"{phase}/{stage}" if layer is None else f"{phase}/layer.{layer}/{stage}"


def step_message(phase: Phase) -> str:
    """The range around one step, from the embedding to the choice of a token: "decode/step"."""
    return f"{phase}/{STEP}"


@lru_cache(maxsize=4096)
def parse(text: str) -> Label | None:
    """The label of a message of the domain `labkit`; None for any other text."""
    found = MESSAGE.fullmatch(text)
    if found is None:
        return None
    phase, layer, stage = Phase(found["phase"]), found["layer"], found["stage"]
    if layer is None and stage in (None, STEP):
        return Label(phase, step=stage == STEP)
    return Label(phase, Stage(stage), int(layer) if layer else None) if stage in STAGES else None


@cache
def nvtx_listening() -> bool:
    """True in a process that an NVTX tool (nsys profile, ncu) was injected into, which happens when it starts."""
    return any(name in os.environ for name in INJECTED)


def note_fork() -> None:
    """Says in the file that LABKIT_STEP_TIMES names that no profiler sees the ranges of this process."""
    if path := os.environ.get(STEP_TIMES):
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps({"forked": os.getpid()}) + "\n")


@cache
def _note_if_forked(pid: int) -> None:
    """Notes process `pid`, which is this one, where it was forked since this module was imported."""
    if pid != _IMPORTED_BY:
        note_fork()


_IMPORTED_BY = os.getpid()


def torch_profiler_listening() -> bool:
    """True inside torch.profiler (or the older autograd profiler)."""
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.autograd._profiler_enabled())


def listening() -> bool:
    """Whether a profiler would see a range opened now."""
    return not _unwatched and (nvtx_listening() or torch_profiler_listening())


_unwatched = False


@contextlib.contextmanager
def unwatched() -> Iterator[None]:
    """No range is announced and no step timed within, and nobody is asked whether they listen.

    For runs that warm up what is profiled next, and for measuring what the announcements cost.
    """
    global _unwatched
    before, _unwatched = _unwatched, True
    try:
        yield
    finally:
        _unwatched = before


PhaseWatcher = Callable[[Phase, bool], None]
PHASE_WATCHERS: list[PhaseWatcher] = []  # told just before the range of a phase begins (True) and after it has ended


class Range:
    """A range for every profiler that listens when it opens; a context, or open and close for hooks. Ranges nest."""

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
        """Closes it for those that were listening when it opened."""
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
    """Milliseconds of this process's steps by phase, if somebody asked for them."""
    path = os.environ.get(STEP_TIMES)
    if not path:
        return None
    times: dict[Phase, list[float]] = {phase: [] for phase in Phase}

    def write() -> None:
        if os.getpid() != _IMPORTED_BY:  # a fork, which has its parent's times too, and whose ranges nobody sees
            return
        with open(path, "a", encoding="utf-8") as file:
            file.writelines(json.dumps({"phase": phase, "step_ms": ms}) + "\n" for phase, ms in times.items() if ms)

    atexit.register(write)
    return times


class StepRanges:
    """The ranges around steps and phases: "decode" around all steps of a phase in a row, "decode/step" around each.

    Where LABKIT_STEP_TIMES names a file, the milliseconds of every step are written there when the process ends, one
    JSON line for each phase: a profiled run and an unprofiled one can be compared without a profiler's own clock.
    """

    def __init__(self) -> None:
        self._phase: Phase | None = None
        self._open: list[Range] = []  # that of the phase, then that of the step
        self._since_ns = 0

    def begin(self, phase: Phase) -> None:
        """A step starts here, and the one before it ends."""
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
        """The last step ends here, if there was any."""
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
