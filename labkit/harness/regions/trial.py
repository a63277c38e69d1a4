"""Trial of an edited kernel: it is compiled, run in isolation, compared with the unfused ops, and timed.

python -P -m labkit.harness.regions.trial REGION DTYPE THREADS runs a trial in this process. `try_kernel` runs it in a
fresh process, so a kernel that crashes or never ends does no harm.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import signal
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from labkit.engine.team_size import team_size
from labkit.harness.compare.plan import Schedule
from labkit.harness.judge.judged_process import CRASHES
from labkit.harness.regions.case import layer_case, shape_of
from labkit.harness.regions.layer_side import LayerSide
from labkit.harness.regions.layer_stack import LayerStack, layer_stack
from labkit.harness.regions.sides import FUSED, UNFUSED
from labkit.harness.regions.vocabulary import OP_OF
from labkit.harness.turns.calls import CallEpochs
from labkit.kernels.build import BuildError, load
from labkit.models.dtypes import dtype_of
from labkit.stages import Stage
from labkit.statistics import Ratio
from labkit.statistics.sequential import EPOCHS, planned_ratio
from labkit.system.errors import RunError, UserError
from labkit.system.nearest import did_you_mean
from labkit.system.rounding import round_up

SECONDS = 120
SHAPES = ("tiny-gpt2", "tiny-llama")
TIMED_SHAPE, TIMED_LAYERS, TIMED_EPOCHS = "gpt2", 12, 3
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 4e-3, "int8": 2e-2}  # error / largest value of the result
CANARY = 0xA5
ALIGNMENT = 64


@dataclass(frozen=True)
class Trial:
    """Result of a kernel's trial."""

    region: str
    problem: str | None = None  # None: the kernel is right
    fused_us: float | None = None  # microseconds of a call
    unfused_us: float | None = None
    gain: str = ""  # unfused / fused, with its interval


def try_kernel(region: str, *, dtype: str = "float32", threads: int | None = None) -> Trial:
    """Compiles the kernels from their present sources and tries `region`. ValueError for an unknown region or dtype."""
    if region not in OP_OF:
        raise UserError(f"unknown op {region!r}{did_you_mean(region, OP_OF)}; expected one of {', '.join(OP_OF)}")
    dtype_of(dtype)
    threads = team_size() if threads is None else threads
    command = [sys.executable, "-P", "-m", "labkit.harness.regions.trial", region, dtype, str(threads)]
    try:
        process = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return Trial(
            region,
            f"it did not end within {SECONDS} s: is there an endless loop, or a barrier that not every thread reaches?",
        )
    if process.returncode < 0:
        cause = CRASHES.get(signal.Signals(-process.returncode), "it crashed")
        return Trial(region, f"{cause} ({signal.Signals(-process.returncode).name})")
    if process.returncode:
        raise RunError(f"the trial of {region} failed:\n{process.stderr[-2000:]}")
    return Trial(**json.loads(process.stdout.splitlines()[-1]))


def trial(region: Stage, dtype: str, threads: int) -> Trial:
    """As `try_kernel`, but in this process, which a faulty kernel may crash."""
    try:
        load(dtype)
    except BuildError as error:
        return Trial(region, str(error))
    for name in SHAPES:
        for batch in (1, 3):
            stack = _stack(name, dtype=dtype, batch=batch, context=11, threads=threads, layers=2)
            if problem := _problem(stack, region, TOLERANCE[dtype]):
                return Trial(region, f"{problem} ({name}, batch {batch})")
    stack = _stack(TIMED_SHAPE, dtype=dtype, threads=threads, layers=TIMED_LAYERS)
    fused_us, unfused_us, gain = _timed(stack, region)
    return Trial(region, None, fused_us, unfused_us, str(gain))


def _stack(model: str, **case: Any) -> LayerStack:
    return layer_stack(shape_of(model), layer_case(model, **case))


def _problem(stack: LayerStack, region: Stage, tolerance: float) -> str | None:
    """The first difference between the results of the fused and the unfused op on the same rows; None: equal."""
    plain, partly = stack.side(UNFUSED), stack.with_fused((region,))
    name = OP_OF[region]
    results: list[tuple[Tensor, ...]] = []  # of each call of the op

    def watched(op: Any, *, guard: bool) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            with _Guarded() if guard else nullcontext():
                result = op(*args, **kwargs)
            outputs = result if isinstance(result, tuple) else (result,)
            if region is Stage.QKV:
                cache = args[5]
                new = slice(cache.past, cache.past + 1)
                outputs = (*outputs, cache.keys[:, :, new], cache.values[:, :, new])
            results.append(tuple(tensor.detach().clone().float() for tensor in outputs))
            return result

        return call

    first_results = []
    for side, guard in ((partly, True), (plain, False)):
        results.clear()
        ops = {**side.ops, name: watched(side.ops[name], guard=guard)}
        with torch.inference_mode():
            try:
                replace(side, ops=ops).step(lambda stage: nullcontext())
            except OutsideError as outside:
                return str(outside)
        first_results.append(results[0])
    for index, (got, expected) in enumerate(zip(*first_results, strict=True)):
        got = got[..., : expected.shape[-1]]
        if not got.isfinite().all():
            at = (~got.isfinite()).nonzero()[0].tolist()
            return f"result {index} has {float(got[tuple(at)])} at {at}: not written, or computed from unwritten values"
        error, scale = (got - expected).abs(), float(expected.abs().max())
        if float(error.max()) > tolerance * scale:
            at = np.unravel_index(int(error.argmax()), error.shape)
            position = [int(i) for i in at]
            return f"result {index} is {float(got[at]):.6g} at {position}, expected {float(expected[at]):.6g}"
    return None


def _timed(stack: LayerStack, region: Stage) -> tuple[float, float, Ratio]:
    """Microseconds of a fused and of an unfused call, and the gain of fusing, in epochs with weights in new memory."""
    sides = stack.side(FUSED), stack.side(UNFUSED)
    calls = [partial(_median_us, side, region) for side in sides]
    measured = CallEpochs(calls, stack.tensors).run(Schedule(rounds=TIMED_EPOCHS))
    fused, unfused = np.array(measured.results).T
    gain = planned_ratio(measured.epoch_centres(np.log(unfused / fused)), EPOCHS)
    return float(np.median(fused)), float(np.median(unfused)), gain


def _median_us(side: LayerSide, region: Stage) -> float:
    return float(np.median(side.times()[region])) / 1e3


class OutsideError(RuntimeError):
    """A kernel wrote outside of its result."""


class _Guarded(TorchFunctionMode):
    """Guards new float32 tensors: they are filled with NaN, have canaries on both sides, and end at a forbidden page.

    If a kernel writes outside of its result, the block's end raises OutsideError, or the process dies at once.
    """

    def __init__(self) -> None:
        super().__init__()
        self._watched: list[tuple[np.ndarray[Any, Any], int, int]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.empty and kwargs.get("dtype", torch.float32) == torch.float32 and set(kwargs) <= {"dtype"}:
            return self._empty(torch.Size(args[0] if len(args) == 1 and not isinstance(args[0], int) else args))
        if func is torch.empty_like and args[0].dtype == torch.float32 and not kwargs:
            return self._empty(args[0].shape)
        return func(*args, **kwargs)

    def __exit__(self, kind: Any, error: Any, at: Any) -> None:
        super().__exit__(kind, error, at)
        for index, (bytes_, begin, count) in enumerate(self._watched if error is None else ()):
            if (bytes_[:begin] != CANARY).any():
                raise OutsideError(f"it wrote before the beginning of result {index}")
            if (bytes_[begin + count :] != CANARY).any():
                raise OutsideError(f"it wrote past the end of result {index}")

    def _empty(self, size: torch.Size) -> Tensor:
        count = 4 * size.numel()
        page = mmap.PAGESIZE
        pages = round_up(count + ALIGNMENT, page)
        memory = mmap.mmap(-1, pages + 2 * page, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        raw = np.frombuffer(memory, dtype=np.uint8)
        raw[page:-page] = CANARY
        begin = (page + pages - count) // ALIGNMENT * ALIGNMENT
        _forbid(raw.ctypes.data, page)
        _forbid(raw.ctypes.data + page + pages, page)
        self._watched.append((raw[page:-page], begin - page, count))
        tensor = torch.frombuffer(memory, dtype=torch.float32, count=size.numel(), offset=begin)
        return tensor.view(size).fill_(float("nan"))


def _forbid(address: int, size: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(size), 0):
        raise OSError(ctypes.get_errno(), "mprotect")


if __name__ == "__main__":
    sys.stdout.write(json.dumps(asdict(trial(Stage(sys.argv[1]), sys.argv[2], int(sys.argv[3])))) + "\n")
