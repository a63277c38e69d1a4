"""Checks of the public ops' arguments. The kernels themselves read and write memory without checks.

`checked` takes a table with a check for each argument, in the order in which they run. The engine makes its arguments
itself and calls `unchecked` ops.
"""

import inspect
import math
from collections.abc import Callable, Sequence
from functools import wraps
from itertools import combinations
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from labkit.system.errors import UserError, UserTypeError
from labkit.system.rounding import BLOCK, ceil_div, round_up

from .codes import FINEST, PACKED, WORD, packed_shape
from .dispatch import MOST_THREADS
from .int8_cache import SCALE_DTYPE
from .types import (
    MOST_REAL,
    NORM_KINDS,
    AttentionParams,
    Heads,
    LayerCache,
    Linear,
    Norm,
    QkvWeights,
    Rotary,
    Rows,
    check_heads,
    float_dtype,
    padded_head_dim,
)

IMPLS = ("cpp", "reference", "triton")
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
MOST = 2**31 - 1  # of an int32
MOST_UNITS = 1 << 24  # units of work that one call can give its threads: 24 bits of Team::Hand in team.h

Size = int | str | None
P = ParamSpec("P")
R = TypeVar("R")


class ArgumentCheck:
    """Checks the arguments of a call. Keeps facts from the arguments so far, which later arguments must fit: sizes by
    name, the device, the rows, and the types that a floating cache or a packed matrix may have.
    """

    def __init__(self, op: str, impl: str) -> None:
        self.op, self.impl = op, impl
        self.sizes: dict[str, int] = {}
        self.device = torch.device("cpu") if impl == "cpp" else None
        self.rows: Rows | None = None
        self.later_dtypes: Sequence[torch.dtype] = FLOATS

    def tensor(self, name: str, value: Any, dtypes: torch.dtype | Sequence[torch.dtype], *shape: Size) -> None:
        """Raises UserError unless `value` is a contiguous tensor of one of these types, on the device of the call, and
        of this shape. A size is a number, a name, or None for any size. The first tensor with a name sets its size.
        """
        dtypes = (dtypes,) if isinstance(dtypes, torch.dtype) else dtypes
        sizes = [self.sizes.get(size, size) if isinstance(size, str) else size for size in shape]
        if isinstance(value, Tensor) and self.device is None:
            self.device = value.device
        if flaw := self._flaw(value, dtypes, sizes):
            types = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            numbers = ", ".join("any" if size is None else str(size) for size in sizes)
            kind = UserError if isinstance(value, Tensor) else UserTypeError
            raise kind(f"{name}: expected contiguous {types} [{numbers}], got {flaw}")
        self.sizes |= {size: actual for size, actual in zip(sizes, value.shape, strict=True) if isinstance(size, str)}

    def _flaw(self, value: Any, dtypes: Sequence[torch.dtype], sizes: Sequence[Size]) -> str | None:
        """A description of `value` if it is not as expected, else None."""
        if not isinstance(value, Tensor):
            return type(value).__name__
        fits = len(sizes) == value.dim() and all(
            not isinstance(size, int) or size == actual for size, actual in zip(sizes, value.shape, strict=True)
        )
        got = f"{value.dtype} {list(value.shape)}"
        if value.dtype not in dtypes or not fits or value.numel() == 0:
            return got
        if value.device != self.device:
            return f"{got} on {value.device} instead of {self.device}"
        if value.layout != torch.strided or not value.is_contiguous() or value.is_neg():
            return f"{got} that is not contiguous; use .contiguous().resolve_neg()"
        return f"{got} whose memory is freed" if value.untyped_storage().nbytes() < value.nbytes else None

    def number(self, name: str, value: Any, least: int, most: int = MOST) -> int:
        """Raises UserError unless `value` is a whole number from `least` to `most`."""
        expected = f"expected {least} or more" if most == MOST else f"expected {least} to {most}"
        if not isinstance(value, int) or isinstance(value, bool):
            raise UserTypeError(f"got {name} = {value!r}, {expected}, a whole number")
        if not least <= value <= most:
            raise UserError(f"got {name} = {value}, {expected}")
        return value

    def real(self, name: str, value: Any, least: float = -math.inf, most: float = math.inf) -> None:
        if not isinstance(value, int | float) or not abs(value) <= MOST_REAL or not least <= value <= most:
            expected = "a finite float32" + (f" of {least:g} or more" if least > -math.inf else "")
            expected += f", at most {most:g}" if most < math.inf else ""
            raise UserError(f"got {name} = {value!r}, expected {expected}")

    def one_of(self, name: str, value: Any, values: Sequence[Any]) -> None:
        if type(value) is not type(values[0]) or value not in values:
            raise UserError(f"got {name} = {value!r}, expected {' or '.join(map(repr, values))}")

    def within(self, name: str, values: Tensor, end: int, reason: str) -> None:
        """Raises UserError unless all numbers of an integer tensor are at least 0 and below `end`."""
        if values.numel() and not 0 <= int(values.min()) <= int(values.max()) < end:
            raise UserError(
                f"{name}: got {int(values.min())} to {int(values.max())}, expected 0 to {end - 1}: {reason}"
            )


Check = Callable[[str, Any, ArgumentCheck], None]


def checked(**table: Check) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A decorator that makes an op check its arguments. table: a check for each argument, in running order; `impl` and
    `threads`, if the op has them, are checked before.
    """

    def around(op: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(op)

        @wraps(op)
        def public(*args: P.args, **kwargs: P.kwargs) -> R:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            arguments = bound.arguments
            call = ArgumentCheck(op.__name__, arguments.get("impl", "reference"))
            if call.impl not in IMPLS:
                raise UserError(f"{call.op}: unknown impl {call.impl!r}; expected one of {', '.join(IMPLS)}")
            if "threads" in arguments:
                call.number("threads", arguments["threads"], 1, MOST_THREADS)
            for name, check in table.items():
                check(name, arguments[name], call)
            return op(*args, **kwargs)

        return public

    return around


def unchecked(op: Callable[P, R]) -> Callable[P, R]:
    """The public op without its checks, for callers that made the arguments themselves."""
    trusting: Callable[P, R] = op.__wrapped__  # type: ignore[attr-defined]
    return trusting


def floats(*shape: Size) -> Check:
    return lambda name, value, call: call.tensor(name, value, torch.float32, *shape)


def maybe(check: Check) -> Check:
    """The check for an argument that may be None."""
    return lambda name, value, call: None if value is None else check(name, value, call)


def flag(name: str, value: Any, call: ArgumentCheck) -> None:
    call.one_of(name, value, (False, True))


def record(kind: type, check: Check) -> Check:
    """A check of a record's class, and then of its fields."""

    def run(name: str, value: Any, call: ArgumentCheck) -> None:
        if not isinstance(value, kind):
            raise UserTypeError(f"{name}: expected a {kind.__name__}, got {type(value).__name__}")
        check(name, value, call)

    return run


def _norm(name: str, norm: Norm, call: ArgumentCheck) -> None:
    """Checks a norm over rows of `width`."""
    call.one_of(f"{name}.kind", norm.kind, NORM_KINDS)
    call.real(f"{name}.eps", norm.eps, 0.0)
    if norm.kind == "none":
        if norm.weight is not None or norm.bias is not None:
            raise UserError(f"{name}: got a weight or a bias for the kind 'none', expected None")
        return
    call.tensor(f"{name}.weight", norm.weight, torch.float32, "width")
    if norm.bias is not None:
        if norm.kind == "rms":
            raise UserError(f"{name}.bias: got one for the kind 'rms', expected None: an RMSNorm has none")
        call.tensor(f"{name}.bias", norm.bias, torch.float32, "width")


def _linear(name: str, linear: Linear, call: ArgumentCheck) -> None:
    """Checks a matrix, and sets `width` to its inputs."""
    outputs = call.number(f"{name}.outputs", linear.outputs, 1)
    inputs = call.number(f"{name}.inputs", linear.inputs, 1)
    call.sizes |= {"width": inputs, "outputs": outputs}
    if not isinstance(linear.weight, Tensor):
        raise UserTypeError(f"{name}.weight: expected a tensor, got {type(linear.weight).__name__}")
    panels, words = linear.layout == "panels", linear.layout == "words" and linear.scales is not None
    if call.impl != "reference" or not words:
        layouts = {"cpp": "panels", "reference": "rows", "triton": "rows" if linear.scales is None else "words"}
        linear.require(layouts[call.impl], call.impl)
    call.number(f"{name}.group", linear.group, 0)
    call.one_of(f"{name}.bits", linear.bits, (8, 4))
    call.one_of(f"{name}.activation_bits", linear.activation_bits, (16, 8))
    types: Sequence[torch.dtype] = FLOATS
    if linear.scales is not None:
        types = (PACKED[linear.bits] if panels else torch.int8,)
        _scales(name, linear, call)
    shape: tuple[int, ...] = (outputs, inputs)
    if panels:
        shape = packed_shape(outputs, inputs, linear.weight.dtype)
    elif words:
        shape = (outputs, ceil_div(inputs, WORD[linear.bits]), 4)
    call.tensor(f"{name}.weight", linear.weight, types, *shape)
    if linear.bias is not None:
        whole = round_up(outputs, BLOCK)
        padded = panels and isinstance(linear.bias, Tensor) and linear.bias.shape == (whole,)
        call.tensor(f"{name}.bias", linear.bias, torch.float32, whole if padded else outputs)


def _scales(name: str, linear: Linear, call: ArgumentCheck) -> None:
    group = call.number(f"{name}.group", linear.group, 1)
    if group % FINEST[linear.bits]:
        raise UserError(f"got {name}.group = {group}, expected a multiple of {FINEST[linear.bits]}")
    shape: tuple[Size, ...] = (linear.outputs, ceil_div(linear.inputs, group), None)
    if linear.layout == "panels":
        shape = (ceil_div(linear.outputs, BLOCK), *shape[1:], BLOCK)
    call.tensor(f"{name}.scales", linear.scales, torch.float16, *shape)
    assert linear.scales is not None
    call.one_of(f"{name}.scales.shape[2]", linear.scales.shape[2], (1, 2))


def _qkv(name: str, weights: QkvWeights, call: ArgumentCheck) -> None:
    """Checks the weights of region 1 against the heads of the call."""
    linear(f"{name}.proj", weights.proj, call)
    norm(f"{name}.norm", weights.norm, call)
    outputs = (call.sizes["query"] + 2 * call.sizes["kv"]) * call.sizes["dim"]
    if weights.proj.outputs != outputs:
        raise UserError(f"got {name}.proj.outputs = {weights.proj.outputs}, expected {outputs} for these heads")
    if (weights.q_norm is None) != (weights.k_norm is None):
        raise UserError(f"{name}: got one of q_norm and k_norm, expected both or none")
    flag(f"{name}.whole_norms", weights.whole_norms, call)
    keys = call.sizes["kv"] * call.sizes["dim"]
    for part, weight, whole in (("q_norm", weights.q_norm, "queries"), ("k_norm", weights.k_norm, keys)):
        maybe(floats(whole if weights.whole_norms else "dim"))(f"{name}.{part}", weight, call)
    if weights.whole_norms and weights.q_norm is None:
        raise UserError(f"{name}: got whole_norms without q_norm and k_norm, expected both")
    call.sizes["table"] = call.number(f"{name}.table", weights.table, 0)
    call.real(f"{name}.qk_eps", weights.qk_eps, 0.0)
    if call.impl == "cpp":  # one library for each type of weights
        call.later_dtypes = (float_dtype(weights.proj.weight.dtype),)


def _heads(name: str, heads: Heads, call: ArgumentCheck) -> None:
    query, kv = (call.number(f"{name}.{part}", getattr(heads, part), 1) for part in ("query", "kv"))
    if query % kv:
        raise UserError(f"got {name}.query = {query}, expected a multiple of {name}.kv = {kv}")
    dim = call.number(f"{name}.dim", heads.dim, 1)
    check_heads(heads, call.impl)
    call.sizes |= {"query": query, "kv": kv, "dim": dim, "head row": padded_head_dim(dim), "queries": query * dim}


def _rows(name: str, rows: Rows, call: ArgumentCheck) -> None:
    batch, tokens = (call.number(f"{name}.{part}", getattr(rows, part), 1) for part in ("batch", "tokens"))
    if (units := batch * tokens * call.sizes["query"]) >= MOST_UNITS:
        raise UserError(f"got {units} heads of rows in one call, expected less than {MOST_UNITS}; use several calls")
    call.one_of(f"{name}.batch % alike", batch % call.number(f"{name}.alike", rows.alike, 1, batch), (0,))
    call.number(f"{name}.shared", rows.shared, 0)
    call.rows, call.sizes = rows, call.sizes | {"batch": batch, "tokens": tokens, "rows": batch * tokens}
    call.tensor(f"{name}.positions", rows.positions, torch.int32, "rows")
    call.tensor(f"{name}.first", rows.first, torch.int32, "batch")
    call.within(f"{name}.first", rows.first, MOST + 1, "slots are counted from 0")
    call.within(f"{name}.positions", rows.positions, MOST + 1, "positions are counted from 0")
    for part, dtype in (("visible", torch.uint8), ("key_positions", torch.int32)):
        if (table := getattr(rows, part)) is not None:
            call.tensor(f"{name}.{part}", table, dtype, "batch", "slots of tables")


def _rotary(name: str, rotary: Rotary, call: ArgumentCheck) -> None:
    several: tuple[Size, ...] = ("tables",) if isinstance(rotary.cosine, Tensor) and rotary.cosine.dim() == 3 else ()
    call.tensor(f"{name}.cosine", rotary.cosine, torch.float32, *several, "positions", "angles")
    call.tensor(f"{name}.sine", rotary.sine, torch.float32, *several, "positions", "angles")
    if (table := call.sizes.get("table", 0)) >= (tables := call.sizes.get("tables", 1)):
        raise UserError(f"got table {table} of a rotary embedding with {tables}, expected one of its tables")
    flag(f"{name}.interleaved", rotary.interleaved, call)
    if 2 * (angles := call.sizes["angles"]) > (dim := call.sizes["dim"]):
        raise UserError(
            f"{name}: got tables of {angles} angles, expected at most {dim // 2} for heads of {dim} numbers"
        )
    assert call.rows is not None
    call.within("rows.positions", call.rows.positions, call.sizes["positions"], "the rotary tables hold no more")


def _cache(name: str, cache: LayerCache, call: ArgumentCheck) -> None:
    past, rows = call.number(f"{name}.past", cache.past, 0), call.rows
    assert rows is not None
    shape: tuple[Size, ...] = ("batch", "kv", "capacity", "head row")
    call.tensor(f"{name}.keys", cache.keys, (*call.later_dtypes, torch.int8), *shape)
    call.tensor(f"{name}.values", cache.values, cache.keys.dtype, *shape)
    slots, capacity = past + rows.tokens, call.sizes["capacity"]
    if slots > capacity:
        raise UserError(f"cache of {capacity} slots can't take {rows.tokens} tokens after {past}; grow it")
    rows.require_slots(slots)
    parts = [cache.keys, cache.values]
    for part, scales in (("key_scales", cache.key_scales), ("value_scales", cache.value_scales)):
        if cache.keys.dtype == torch.int8:
            call.tensor(f"{name}.{part}", scales, SCALE_DTYPE, *shape[:3])
            assert scales is not None
            parts.append(scales)
        elif scales is not None:
            raise UserError(f"{name}.{part}: expected None with {cache.keys.dtype}, got {type(scales).__name__}")
    if any(_overlap(*pair) for pair in combinations(parts, 2)):
        raise UserError(f"{name}: keys, values and their scales share memory; expected memory of its own for each")
    if cache.counter is not None:
        call.tensor(f"{name}.counter", cache.counter, torch.int32, 1)


def _overlap(a: Tensor, b: Tensor) -> bool:
    return a.data_ptr() < b.data_ptr() + b.nbytes and b.data_ptr() < a.data_ptr() + a.nbytes


def _attention(name: str, params: AttentionParams, call: ArgumentCheck) -> None:
    call.real(f"{name}.scale", params.scale)
    flag(f"{name}.causal", params.causal, call)
    if params.window is not None:
        call.number(f"{name}.window", params.window, 1)
    for vector in ("slopes", "sinks"):
        maybe(floats("query"))(f"{name}.{vector}", getattr(params, vector), call)
    if params.slopes is not None and call.rows is not None and call.rows.key_positions is None:
        raise UserError("got slopes and no key_positions; ALiBi needs the position of each slot's token in `rows`")


norm, linear = record(Norm, _norm), record(Linear, _linear)
qkv_weights = record(QkvWeights, _qkv)
heads, rows, rotary = record(Heads, _heads), record(Rows, _rows), record(Rotary, _rotary)
cache, attention_params = record(LayerCache, _cache), record(AttentionParams, _attention)
