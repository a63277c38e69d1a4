"""Runs one operator of PyTorch as a trace recorded it: the same shapes, types and strides, with data that we make up.

Floating-point tensors are drawn from a normal distribution, integers from what they index; of tensors in a list the
trace has no types, so they are float32. The time of a call is that of CUDA events on a GPU and of perf_counter_ns on a
CPU. It is measured twice: warm, on the same tensors again and again, as caches like it; and cold, on copies that
together are larger than any cache, as a model meets its weights.
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
INDEXED = {"embedding": (0, 1), "index_select": (0, 2), "gather": (0, 2), "take": (0, 1)}  # what, by which argument
CALLS, WARM_UP = 30, 5
COLD_BYTES, MOST_COPIES = 1 << 30, 64


@dataclass(frozen=True)
class RecordedCall:
    """A call as a trace tells it, argument by argument: sizes, types and strides of tensors (of a list of tensors,
    those of each), () and "" for what is none; values as text. traced_us: the median time of such calls there.
    """

    name: str
    dims: tuple[tuple[Any, ...], ...]
    types: tuple[str, ...]
    strides: tuple[tuple[Any, ...], ...]
    values: tuple[str, ...]
    traced_us: float
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
    """The command line of a script that holds a call: replays it, and prints its times beside the traced one."""

    def main(
        device: Annotated[str, typer.Option(help="cuda or cpu; by default cuda where there is one.")] = "",
    ) -> None:
        found = measure(call, device or ("cuda" if torch.cuda.is_available() else "cpu"))
        terminal().print(_table(call, found))

    run_command(lambda: typer.run(main))


def measure(call: RecordedCall, device: str, *, calls: int = CALLS, seed: int = 0) -> Replayed:
    """The times of a call on a device. UserError where PyTorch has no such operator, or it cannot be called so."""
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
        found = getattr(packet, overload)
        wanted = found._schema.arguments
        if any(argument.name == "filename" for argument in wanted):
            raise UserError(f"got {call.name}, which works on a file that the trace names; replay one that computes")
        if len(call.dims) <= len(wanted) and all(map(_fits, wanted, [_kind(call, at) for at in range(len(call.dims))])):
            return found
    raise UserError(
        f"got {call.name} with {len(call.dims)} arguments of the types {call.types}, expected those of {packet}"
    )


def arguments(call: RecordedCall, run: Any, device: str) -> dict[str, Any]:
    """Arguments of the recorded shapes by name, made anew."""
    made: dict[str, Any] = {}
    for at, wanted in enumerate(run._schema.arguments[: len(call.dims)]):
        kind = _kind(call, at)
        if kind == "tensor":
            made[wanted.name] = _tensor(call, at, device)
        elif kind == "tensors":
            sizes = call.dims[at]
            made[wanted.name] = [torch.randn(tuple(each), device=device) for each in sizes]
        else:
            made[wanted.name] = _value(call.values[at] if at < len(call.values) else "", wanted)
    return made


def _kind(call: RecordedCall, at: int) -> str:
    if call.types[at] in LISTS:
        return "tensors"
    return (
        "tensor"
        if call.types[at].removeprefix("c10::") in DTYPES
        and call.types[at] not in ("Scalar",)
        and (call.dims[at] or not (at < len(call.values) and call.values[at]))
        else "value"
    )


def _fits(wanted: Any, kind: str) -> bool:
    of_list = str(wanted.type) in ("List[Tensor]", "List[Optional[Tensor]]")
    of_tensor = "Tensor" in str(wanted.type) and not of_list
    if kind == "tensors":
        return of_list
    return of_tensor if kind == "tensor" else not of_list and (not of_tensor or "Optional" in str(wanted.type))


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
    """How many values an integer tensor may have: as many as what it indexes."""
    of, by = INDEXED.get(call.name.partition("::")[2], (0, 1))
    if at != by or not call.dims[of]:
        return 2
    axis = int(call.values[1]) if of == 0 and by == 2 and len(call.values) > 1 and call.values[1] else 0
    return int(call.dims[of][axis])


def _value(text: str, wanted: Any) -> Any:
    """What a recorded text stands for; the default where nothing was recorded."""
    if text in ("", "None"):
        return wanted.default_value if wanted.has_default_value() else None
    if text in ("True", "False"):
        return text == "True"
    if text.startswith("["):
        return [_value(each.strip(), wanted) for each in text[1:-1].split(",") if each.strip()]
    kind = str(wanted.type)
    if kind in ("str", "Optional[str]"):
        return text
    try:
        return int(text) if "float" not in kind and "." not in text and "e" not in text else float(text)
    except ValueError:
        return wanted.default_value if wanted.has_default_value() else None


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


def _table(call: RecordedCall, found: Replayed) -> Table:
    shapes = ", ".join(_shape(dims) for dims in call.dims if dims)
    table = Table("", title=Text(f"{call.name} of {shapes} on {found.device}"), title_justify="left")
    for name in ("median µs", "interquartile range", "TFLOP/s", "GB/s"):
        table.add_column(name, justify="right")
    for name, samples in ((f"cold, {found.copies} copies", found.cold_us), ("warm, one copy", found.warm_us)):
        told = summarise(samples)
        table.add_row(name, f"{told.median:,.2f}", f"{told.spread:.0%}", *_rates(call, told.median))
    table.add_row(Text(f"traced on {call.traced_on}"), f"{call.traced_us:,.2f}", "", *_rates(call, call.traced_us))
    return table


def _shape(dims: tuple[Any, ...]) -> str:
    return f"[{', '.join(map(_shape, dims))}]" if isinstance(dims[0], tuple) else "x".join(map(str, dims))


def _rates(call: RecordedCall, took_us: float) -> Sequence[str]:
    return (
        f"{call.flops / took_us / 1e6:,.2f}" if call.flops else "",
        f"{call.bytes / took_us / 1e3:,.1f}" if call.bytes else "",
    )
