"""Runs one operator of PyTorch as a trace recorded it: the same shapes, types and strides, with made-up data.

Floating-point values are drawn from a normal distribution, integers from the valid indices. A trace has no types for
tensors in a list, so they are float32. CUDA events time a call on a GPU, perf_counter_ns on a CPU. Each call is
measured twice: warm, on the same tensors again and again; and cold, as a model meets its weights, on up to 64 copies
in turns. Together the copies are larger than any cache, except for small tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from time import perf_counter_ns
from typing import Annotated, Any

import torch
import typer
from rich.table import Table
from rich.text import Text

from labkit.statistics import summarise
from labkit.system.command import run_command
from labkit.system.errors import UserError
from labkit.system.terminal import terminal

DTYPES = {
    "float": torch.float32, "double": torch.float64, "Half": torch.float16, "BFloat16": torch.bfloat16,
    "long int": torch.int64, "long": torch.int64, "int": torch.int32, "short": torch.int16, "signed char": torch.int8,
    "unsigned char": torch.uint8, "bool": torch.bool, "Float8_e4m3fn": torch.float8_e4m3fn,
    "Float8_e5m2": torch.float8_e5m2,
}  # fmt: skip
LISTS = ("TensorList",)
# operator: (indexed argument, argument with the indices)
INDEXED = {"embedding": (0, 1), "index_select": (0, 2), "gather": (0, 2), "take": (0, 1)}
CALLS, WARM_UP = 30, 5
COLD_BYTES, MOST_COPIES = 1 << 30, 64  # of the copies for cold calls: as many as fit, but no more than 64


@dataclass(frozen=True)
class RecordedCall:
    """A call as a trace recorded it, argument by argument. An argument that is no tensor has () and ""."""

    name: str
    dims: tuple[tuple[Any, ...], ...]  # sizes of a tensor, or of each tensor of a list
    types: tuple[str, ...]
    strides: tuple[tuple[Any, ...], ...]
    values: tuple[str, ...]  # as text
    traced_us: float  # median time of such calls in the trace
    traced_on: str
    flops: int = 0
    bytes: int = 0


@dataclass(frozen=True)
class Replayed:
    """Microseconds of each call."""

    warm_us: tuple[float, ...]
    cold_us: tuple[float, ...]
    copies: int
    device: str


def replay(call: RecordedCall) -> None:
    """Command line of a script that holds a call. Replays it, and prints its times with the traced one."""

    def main(
        device: Annotated[str, typer.Option(help="cuda or cpu; by default cuda where there is one.")] = "",
    ) -> None:
        replayed = measure(call, device or ("cuda" if torch.cuda.is_available() else "cpu"))
        terminal().print(_table(call, replayed))

    run_command(lambda: typer.run(main))


def measure(call: RecordedCall, device: str, *, calls: int = CALLS, seed: int = 0) -> Replayed:
    """The times of a call on a device. UserError where PyTorch has no such operator, or the call fails."""
    run = operator(call)
    torch.manual_seed(seed)
    size = sum(prod(dims) * 4 for dims in call.dims if dims and not isinstance(dims[0], tuple)) or 1
    copies = max(2, min(MOST_COPIES, COLD_BYTES // size))
    inputs = [arguments(call, run, device) for _ in range(copies)]
    clock = _gpu_us if device.startswith("cuda") else _cpu_us
    with torch.no_grad():
        try:
            for _ in range(WARM_UP):
                run(**inputs[0])
        except (RuntimeError, IndexError, NotImplementedError) as error:
            raise UserError(
                f"got {call.name} of {call.dims}, which fails with made-up data ({str(error).splitlines()[0]}); replay "
                "an operator whose result does not depend on the values of its inputs"
            ) from None
        warm = [clock(lambda: run(**inputs[0])) for _ in range(calls)]
        cold = [clock(lambda at=at: run(**inputs[at % copies])) for at in range(1, calls + 1)]  # type: ignore[misc]
    name = torch.cuda.get_device_name() if device.startswith("cuda") else "CPU"
    return Replayed(tuple(warm), tuple(cold), copies, name)


def operator(call: RecordedCall) -> Any:
    """The overload of `torch.ops` that takes these arguments."""
    space, _, name = call.name.partition("::")
    packet = getattr(getattr(torch.ops, space, None), name, None) if name else None
    if not isinstance(packet, torch._ops.OpOverloadPacket):
        raise UserError(f"got the operator {call.name!r}, which this PyTorch {torch.__version__} does not have")
    for overload in packet.overloads():
        candidate = getattr(packet, overload)
        expected = candidate._schema.arguments
        if any(argument.name == "filename" for argument in expected):
            raise UserError(
                f"got {call.name}, which works on a file that the trace names; replay an operator that computes"
            )
        kinds = [_kind(call, at) for at in range(len(call.dims))]
        if len(kinds) <= len(expected) and all(map(_fits, expected, kinds)):
            return candidate
    raise UserError(
        f"got {call.name} with {len(call.dims)} arguments of the types {call.types}, expected those of {packet}"
    )


def arguments(call: RecordedCall, run: Any, device: str) -> dict[str, Any]:
    """New arguments of the recorded shapes, by name."""
    values: dict[str, Any] = {}
    for at, argument in enumerate(run._schema.arguments[: len(call.dims)]):
        kind = _kind(call, at)
        if kind == "tensor":
            values[argument.name] = _tensor(call, at, device)
        elif kind == "tensors":
            sizes = call.dims[at]
            values[argument.name] = [torch.randn(tuple(dims), device=device) for dims in sizes]
        else:
            values[argument.name] = _value(call.values[at] if at < len(call.values) else "", argument)
    return values


def _kind(call: RecordedCall, at: int) -> str:
    """Kind of a recorded argument: "tensors", "tensor" or "value". An argument of a tensor's type that has no sizes is
    a value if the trace has one, and else a tensor of one number.
    """
    if call.types[at] in LISTS:
        return "tensors"
    has_value = at < len(call.values) and call.values[at]
    is_tensor = call.types[at].removeprefix("c10::") in DTYPES and (call.dims[at] or not has_value)
    return "tensor" if is_tensor else "value"


def _fits(argument: Any, kind: str) -> bool:
    expected = str(argument.type)
    if expected in ("List[Tensor]", "List[Optional[Tensor]]"):
        return kind == "tensors"
    takes_tensor = "Tensor" in expected
    if kind == "value":
        return not takes_tensor or "Optional" in expected
    return kind == "tensor" and takes_tensor


def _tensor(call: RecordedCall, at: int, device: str) -> torch.Tensor:
    dims = tuple(call.dims[at])
    strides = tuple(call.strides[at]) if at < len(call.strides) and len(call.strides[at]) == len(dims) else None
    dtype = DTYPES[call.types[at].removeprefix("c10::")]
    length = prod(dims) if strides is None else 1 + sum((n - 1) * s for n, s in zip(dims, strides, strict=True) if n)
    if dtype == torch.bool:
        data = torch.rand(length, device=device) < 0.5
    elif dtype.is_floating_point:
        data = torch.randn(length, device=device).to(dtype)
    else:
        data = torch.randint(0, _indexed(call, at), (length,), device=device, dtype=torch.int64).to(dtype)
    return data.view(dims) if strides is None else data.as_strided(dims, strides)


def _indexed(call: RecordedCall, at: int) -> int:
    """The number of values that an integer tensor may have: the length of the axis that it indexes."""
    indexed, indices = INDEXED.get(call.name.partition("::")[2], (0, 1))
    if at != indices or not call.dims[indexed]:
        return 2
    axis = int(call.values[1]) if indexed == 0 and indices == 2 and len(call.values) > 1 and call.values[1] else 0
    return int(call.dims[indexed][axis])


def _value(text: str, argument: Any) -> Any:
    """The value of a recorded text; the argument's default where nothing was recorded."""
    if text in ("", "None"):
        return argument.default_value if argument.has_default_value() else None
    if text in ("True", "False"):
        return text == "True"
    if text.startswith("["):
        return [_value(part.strip(), argument) for part in text[1:-1].split(",") if part.strip()]
    kind = str(argument.type)
    if kind in ("str", "Optional[str]"):
        return text
    try:
        return int(text) if "float" not in kind and "." not in text and "e" not in text else float(text)
    except ValueError:
        return argument.default_value if argument.has_default_value() else None


def _cpu_us(run: Callable[[], object]) -> float:
    start = perf_counter_ns()
    run()
    return (perf_counter_ns() - start) / 1e3


def _gpu_us(run: Callable[[], object]) -> float:
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    before.record()
    run()
    after.record()
    after.synchronize()
    return before.elapsed_time(after) * 1e3


def _table(call: RecordedCall, replayed: Replayed) -> Table:
    shapes = ", ".join(_shape(dims) for dims in call.dims if dims)
    table = Table("", title=Text(f"{call.name} of {shapes} on {replayed.device}"), title_justify="left")
    for name in ("median µs", "interquartile range", "TFLOP/s", "GB/s"):
        table.add_column(name, justify="right")
    for name, samples in ((f"cold, {replayed.copies} copies", replayed.cold_us), ("warm, one copy", replayed.warm_us)):
        summary = summarise(samples)
        table.add_row(name, f"{summary.median:,.2f}", f"{summary.spread:.0%}", *_rates(call, summary.median))
    table.add_row(Text(f"traced on {call.traced_on}"), f"{call.traced_us:,.2f}", "", *_rates(call, call.traced_us))
    return table


def _shape(dims: tuple[Any, ...]) -> str:
    return f"[{', '.join(map(_shape, dims))}]" if isinstance(dims[0], tuple) else "x".join(map(str, dims))


def _rates(call: RecordedCall, took_us: float) -> Sequence[str]:
    return (
        f"{call.flops / took_us / 1e6:,.2f}" if call.flops else "",
        f"{call.bytes / took_us / 1e3:,.1f}" if call.bytes else "",
    )
