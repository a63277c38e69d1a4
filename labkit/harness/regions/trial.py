"""An edited kernel on trial: compiled, run where it can do no harm, held against the unfused ops, and timed.

python -P -m labkit.harness.regions.trial REGION DTYPE THREADS runs one in this process; `try_kernel` does it in a fresh
one, so that a kernel that crashes, or never ends, costs nothing.
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
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from labkit.harness.regions.case import layer_case, shape_of
from labkit.harness.regions.layer_side import LayerSide
from labkit.harness.regions.layer_stack import LayerStack, layer_stack
from labkit.harness.regions.sides import FUSED, UNFUSED
from labkit.harness.regions.vocabulary import OP_OF
from labkit.kernels.build import BuildError, load
from labkit.models.dtypes import dtype_of
from labkit.stages import Stage
from labkit.system.errors import RunError, UserError
from labkit.system.nearest import did_you_mean

SECONDS = 120
SHAPES = ("tiny-gpt2", "tiny-llama")
TIMED_SHAPE, TIMED_LAYERS = "gpt2", 12
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 4e-3, "int8": 2e-2}  # of the largest value there is
CANARY = 0xA5
ALIGNMENT = 64
CAUSES = {
    signal.SIGSEGV: "it read or wrote outside of what it was given",
    signal.SIGBUS: "it read or wrote outside of what it was given",
    signal.SIGILL: "it has an instruction that this CPU lacks",
    signal.SIGFPE: "it divided an integer by zero",
    signal.SIGABRT: "it gave up; was memory freed twice?",
}


@dataclass(frozen=True)
class Trial:
    """What became of a kernel. If `problem` is None it is right, and its times are those of a call in microseconds."""

    region: str
    problem: str | None = None
    fused_us: float | None = None
    unfused_us: float | None = None


def try_kernel(region: str, *, dtype: str = "float32", threads: int | None = None) -> Trial:
    """Compiles the kernels as their sources are now and tries `region`. ValueError for an unknown region or dtype."""
    if region not in OP_OF:
        raise UserError(f"unknown op {region!r}{did_you_mean(region, OP_OF)}; expected one of {', '.join(OP_OF)}")
    dtype_of(dtype)
    threads = torch.get_num_threads() if threads is None else threads
    command = [sys.executable, "-P", "-m", "labkit.harness.regions.trial", region, dtype, str(threads)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return Trial(
            region,
            f"it did not come to an end within {SECONDS} s: is there a loop without end, or a barrier that not every "
            "thread reaches?",
        )
    if done.returncode < 0:
        cause = CAUSES.get(signal.Signals(-done.returncode), "it crashed")
        return Trial(region, f"{cause} ({signal.Signals(-done.returncode).name})")
    if done.returncode:
        raise RunError(f"the trial of {region} failed:\n{done.stderr[-2000:]}")
    return Trial(**json.loads(done.stdout.splitlines()[-1]))


def trial(region: Stage, dtype: str, threads: int) -> Trial:
    """As `try_kernel`, in this process, which a wild kernel may take down."""
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
    fused, unfused = (_median_us(stack.side(name), region) for name in (FUSED, UNFUSED))
    return Trial(region, None, fused, unfused)


def _stack(model: str, **case: Any) -> LayerStack:
    return layer_stack(shape_of(model), layer_case(model, **case))


def _problem(stack: LayerStack, region: Stage, tolerance: float) -> str | None:
    """What is wrong with the first result of the fused op that differs from the unfused op's, on the same rows."""
    plain, partly = stack.side(UNFUSED), stack.with_fused((region,))
    name = OP_OF[region]
    seen: list[tuple[Tensor, ...]] = []  # what each call of the op gave

    def watched(op: Any, *, guard: bool) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            with _Guarded() if guard else nullcontext():
                result = op(*args, **kwargs)
            kept = result if isinstance(result, tuple) else (result,)
            if region is Stage.QKV:
                cache = args[5]
                new = slice(cache.past, cache.past + 1)
                kept = (*kept, cache.keys[:, :, new], cache.values[:, :, new])
            seen.append(tuple(tensor.detach().clone().float() for tensor in kept))
            return result

        return call

    found = []
    for side, guard in ((partly, True), (plain, False)):
        seen.clear()
        ops = {**side.ops, name: watched(side.ops[name], guard=guard)}
        with torch.inference_mode():
            try:
                replace(side, ops=ops).step(lambda stage: nullcontext())
            except OutsideError as error:
                return str(error)
        found.append(seen[0])
    for index, (got, want) in enumerate(zip(*found, strict=True)):
        got = got[..., : want.shape[-1]]
        if not got.isfinite().all():
            at = (~got.isfinite()).nonzero()[0].tolist()
            return (
                f"result {index} holds {float(got[tuple(at)])} at {at}: not written, or computed from what is not there"
            )
        off, scale = (got - want).abs(), float(want.abs().max())
        if float(off.max()) > tolerance * scale:
            at = np.unravel_index(int(off.argmax()), off.shape)
            place = [int(i) for i in at]
            return f"result {index} is {float(got[at]):.6g} at {place}, expected {float(want[at]):.6g}"
    return None


def _median_us(side: LayerSide, region: Stage) -> float:
    side.times()
    return float(np.median([np.median(side.times()[region]) for _ in range(5)])) / 1e3


class OutsideError(RuntimeError):
    """A kernel wrote beside its result."""


class _Guarded(TorchFunctionMode):
    """New float32 tensors are poisoned with NaN, watched on both sides, and end before a page that nobody may touch.

    A kernel that writes beside its result raises OutsideError when the block ends, or ends the process at once.
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
        pages = -(-(count + ALIGNMENT) // page) * page
        memory = mmap.mmap(-1, pages + 2 * page, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        raw = np.frombuffer(memory, dtype=np.uint8)
        raw[page:-page] = CANARY
        begin = (page + pages - count) // ALIGNMENT * ALIGNMENT
        _forbid(raw.ctypes.data, page)
        _forbid(raw.ctypes.data + page + pages, page)
        self._watched.append((raw[page:-page], begin - page, count))
        held = torch.frombuffer(memory, dtype=torch.float32, count=size.numel(), offset=begin)
        return held.view(size).fill_(float("nan"))


def _forbid(address: int, size: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(size), 0):
        raise OSError(ctypes.get_errno(), "mprotect")


if __name__ == "__main__":
    sys.stdout.write(json.dumps(asdict(trial(Stage(sys.argv[1]), sys.argv[2], int(sys.argv[3])))) + "\n")
