"""Calls of public C++ ops with invalid arguments, in a process of its own: `argument_mutants.py FILE EXAMPLES OP`.

Each example is a valid call in which up to three numbers, tensors or records are replaced. It must give the result of
the reference for the same arguments, or raise a UserError. For each op the script prints how many examples gave a
result, and how many were refused. FILE has the latest call, in case it ends the process.
"""

import faulthandler
import sys
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import torch
from helpers.kernels.choices import for_greedy, greedy, plain_greedy
from helpers.kernels.ops import QUANTISED, WEIGHTS, Draw, rows_of
from helpers.kernels.ops_of_hooks import for_delta_step, for_experts, for_norm_rows, for_route
from helpers.kernels.places import at, leaves, put
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from labkit.kernels import attention, delta_step, experts, gemm, mlp_gemm, norm_rows, qkv_gemm, residual_add, route
from labkit.kernels.attention.reference import attention as plain_attention
from labkit.kernels.experts.reference import experts as plain_experts
from labkit.kernels.gemm import unpack_rows
from labkit.kernels.gemm.reference import gemm as plain_gemm
from labkit.kernels.int8_cache import quantised
from labkit.kernels.linear_attention.reference import delta_step as plain_delta_step
from labkit.kernels.mlp_gemm.reference import mlp_gemm as plain_mlp_gemm
from labkit.kernels.norm_rows.reference import norm_rows as plain_norm_rows
from labkit.kernels.qkv_gemm.reference import qkv_gemm as plain_qkv_gemm
from labkit.kernels.residual_add.reference import residual_add as plain_residual_add
from labkit.kernels.route.reference import route as plain_route
from labkit.kernels.types import (
    ACTIVATIONS,
    NORM_KINDS,
    PLAIN_ACTIVATIONS,
    AttentionParams,
    Heads,
    LayerCache,
    Linear,
    MlpWeights,
    Norm,
    QkvWeights,
)
from labkit.system.errors import UserError

WIDTH, INNER = 36, 45
Arguments = dict[str, Any]
DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.int8,
    torch.uint8,
]
NUMBERS = [-(2**31), -1, 0, 1, 2, 3, 7, 64, 257, 2**31 - 1, 2**31, 2**32 + 1, 2**63, 1.5, "3", None, True]
REALS = [-1.0, 0.0, 1e-30, 1e300, float("nan"), float("inf"), None, "small", 3]
WORDS = [*NORM_KINDS, *ACTIVATIONS, "rows", "words", "panels", "nonsense", None, 0]


def a_draw(data: st.DataObject) -> Draw:
    kind = data.draw(st.sampled_from([*WEIGHTS, *QUANTISED]))
    return Draw(torch.int8, **QUANTISED[kind]) if kind in QUANTISED else Draw(WEIGHTS[kind])


def a_norm(data: st.DataObject, draw: Draw) -> Norm:
    return draw.norm(data.draw(st.sampled_from(NORM_KINDS)), WIDTH)


def with_slots(data: st.DataObject, draw: Draw) -> Arguments:
    heads, past = data.draw(st.sampled_from([Heads(3, 3, 20), Heads(4, 2, 16)])), data.draw(st.integers(0, 9))
    batch, tokens = data.draw(st.integers(1, 2)), data.draw(st.sampled_from([1, 2, 30]))
    mask = torch.ones(batch, past + tokens, dtype=torch.int64)
    mask[0, : data.draw(st.integers(0, 3))] = 0
    rows = rows_of(batch, tokens, past, mask=mask if data.draw(st.booleans()) else None, slots=past + tokens + 2)
    cache, _ = draw.cache(heads, rows, past, past + tokens + 3)
    cache = replace(cache, keys=cache.keys.nan_to_num(), values=cache.values.nan_to_num())
    if data.draw(st.booleans()):
        (keys, key_scales), (values, value_scales) = quantised(cache.keys), quantised(cache.values)
        cache = LayerCache(keys, values, past, None, key_scales, value_scales)
    return {"heads": heads, "rows": rows, "cache": cache}


def for_gemm(data: st.DataObject) -> Arguments:
    draw = a_draw(data)
    _, linear = draw.linear(INNER, WIDTH, bias=data.draw(st.booleans()))
    return {"x": draw.normal(data.draw(st.sampled_from([0, 1, 13])), WIDTH), "linear": linear}


def for_residual_add(data: st.DataObject) -> Arguments:
    draw, rows = Draw(), data.draw(st.sampled_from([1, 5]))
    parts = {name: draw.normal(rows, WIDTH) for name in ("residual", "mlp_out", "attn_out")}
    return parts | {name: draw.normal(WIDTH) for name in ("mlp_bias", "attn_bias")}


def for_mlp_gemm(data: st.DataObject) -> Arguments:
    draw, rows, gated = a_draw(data), data.draw(st.sampled_from([1, 5])), data.draw(st.booleans())
    _, up = draw.linear(INNER, WIDTH, gated=gated)
    return {
        "hidden": draw.normal(rows, WIDTH),
        "addend": draw.normal(rows, WIDTH),
        "addend_bias": draw.normal(WIDTH),
        "weights": MlpWeights(a_norm(data, draw), up, data.draw(st.sampled_from(PLAIN_ACTIVATIONS)), gated),
        "residual_from_norm": data.draw(st.booleans()),
    }


def for_attention(data: st.DataObject) -> Arguments:
    draw = Draw(data.draw(st.sampled_from(list(WEIGHTS.values()))))
    call = with_slots(data, draw)
    heads, rows = call["heads"], call["rows"]
    window = data.draw(st.sampled_from([None, 3]))
    slopes = draw.normal(heads.query) if data.draw(st.booleans()) else None
    causal = window is not None or data.draw(st.booleans())
    queries = draw.normal(rows.batch * rows.tokens, heads.query * heads.dim)
    sinks = draw.normal(heads.query) if data.draw(st.booleans()) else None
    return call | {"queries": queries, "params": AttentionParams(0.25, window, slopes, causal, sinks=sinks)}


def for_qkv_gemm(data: st.DataObject) -> Arguments:
    draw = a_draw(data)
    call = with_slots(data, draw)
    heads, rows, cache = call["heads"], call["rows"], call["cache"]
    _, proj = draw.linear((heads.query + 2 * heads.kv) * heads.dim, WIDTH)
    with_norms = data.draw(st.booleans())
    q_norm, k_norm = (1 + draw.normal(heads.dim) if with_norms else None for _ in range(2))
    rotary = draw.rotary(heads.dim // 2 // 2 * 2, 64, interleaved=data.draw(st.booleans()))
    return call | {
        "hidden": draw.normal(rows.batch * rows.tokens, WIDTH),
        "weights": QkvWeights(a_norm(data, draw), proj, q_norm, k_norm, 1e-5),
        "rotary": rotary if data.draw(st.booleans()) else None,
        "cache": cache,
        "residual_from_norm": data.draw(st.booleans()),
    }


Op = tuple[Callable[..., Any], Callable[..., Any], Callable[[st.DataObject], Arguments]]
OPS: Mapping[str, Op] = {
    "gemm": (gemm, lambda x, linear: plain_gemm(x, linear), for_gemm),
    "residual_add": (residual_add, plain_residual_add, for_residual_add),
    "mlp_gemm": (mlp_gemm, plain_mlp_gemm, for_mlp_gemm),
    "attention": (attention, plain_attention, for_attention),
    "qkv_gemm": (qkv_gemm, plain_qkv_gemm, for_qkv_gemm),
    "norm_rows": (norm_rows, plain_norm_rows, for_norm_rows),
    "delta_step": (delta_step, plain_delta_step, for_delta_step),
    "experts": (experts, plain_experts, for_experts),
    "route": (route, plain_route, for_route),
    "choose": (greedy, plain_greedy, for_greedy),
}


def mutated(data: st.DataObject, value: Any) -> Any:
    """Returns another value to replace this one."""
    if isinstance(value, Tensor):
        if is_freed(value) or value.layout != torch.strided:
            return None
        return data.draw(st.sampled_from(TENSORS))(data, value)
    if isinstance(value, bool):
        return data.draw(st.sampled_from([not value, None, 2, "yes"]))
    if isinstance(value, int):
        return data.draw(st.sampled_from([value - 1, value + 1, 2 * value, value + 2**32, *NUMBERS]))
    if isinstance(value, float):
        return data.draw(st.sampled_from(REALS))
    if isinstance(value, str):
        return data.draw(st.sampled_from(WORDS))
    if value is None:
        sizes = st.sampled_from([1, 2, 3, 16, 20, WIDTH, INNER, 64])
        shape = data.draw(st.lists(sizes, min_size=1, max_size=3))
        return data.draw(st.sampled_from([3, torch.ones(shape).to(data.draw(st.sampled_from(DTYPES)))]))
    return data.draw(st.sampled_from([None, {}, Norm(), Heads(1, 1, 16)]))


def _cut(data: st.DataObject, x: Tensor) -> Tensor:
    dim = data.draw(st.integers(0, x.dim() - 1)) if x.dim() else None
    return x if dim is None or not x.shape[dim] else x.narrow(dim, 0, x.shape[dim] - 1).contiguous()


def _longer(data: st.DataObject, x: Tensor) -> Tensor:
    dim = data.draw(st.integers(0, x.dim() - 1)) if x.dim() else None
    return x if dim is None or not x.shape[dim] else torch.cat((x, x.narrow(dim, 0, 1)), dim)


def _strided(data: st.DataObject, x: Tensor) -> Tensor:
    return torch.stack((x, x), dim=-1)[..., 0]


def _filled(data: st.DataObject, x: Tensor) -> Tensor:
    number = data.draw(st.sampled_from([-(2**31), -1, 0, 1, 5, 63, 64, 2**31 - 1]))
    return torch.full_like(x, number) if x.dtype in (torch.int32, torch.int64) else x.clone()


def is_freed(x: Tensor) -> bool:
    """Whether the memory of a tensor is freed. torch itself crashes when it reads such a tensor."""
    return x.layout == torch.strided and x.untyped_storage().nbytes() < x.nbytes


def _freed(data: st.DataObject, x: Tensor) -> Tensor:
    freed = x.clone()
    freed.untyped_storage().resize_(0)
    return freed


TENSORS: list[Callable[[st.DataObject, Tensor], Any]] = [
    _cut,
    _longer,
    _strided,
    _filled,
    _filled,
    _freed,
    lambda data, x: x.to(data.draw(st.sampled_from(DTYPES))),
    lambda data, x: x.transpose(0, -1) if x.dim() else x,
    lambda data, x: x.flatten(),
    lambda data, x: x[None],
    lambda data, x: x[..., :1].expand(x.shape) if x.dim() else x,
    lambda data, x: torch._neg_view(x) if x.is_floating_point() else x,
    lambda data, x: x.to("meta"),
    lambda data, x: x.to_sparse() if x.is_floating_point() else x,
    lambda data, x: None,
    lambda data, x: [1.0, 2.0],
]


def plain(value: Any, gated: bool = False) -> Any:
    """Copy of the arguments for the reference: matrices row by row, in float32."""
    if isinstance(value, Tensor):
        return value if is_freed(value) else value.detach().clone()
    if isinstance(value, Linear):
        if value.outputs > 1000:
            raise MemoryError
        weight, bias = unpack_rows(value, torch.arange(value.outputs)), value.bias
        bias = None if bias is None else bias[: value.outputs]
        if gated:
            weight = _parted(weight)
            bias = None if bias is None else _parted(bias)
        return Linear(weight, bias, value.outputs, value.inputs, "rows")
    if isinstance(value, MlpWeights):
        return replace(value, norm=plain(value.norm), up=plain(value.up, gated=value.gated))
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{field.name: plain(getattr(value, field.name)) for field in fields(value)})
    return tuple(map(plain, value)) if isinstance(value, tuple) else value


def _parted(rows: Tensor) -> Tensor:
    """Alternating half blocks of gate and up -> all of gate, then all of up."""
    return rows.unflatten(0, (-1, 2, 16)).transpose(0, 1).flatten(0, 2)


def check_near(name: str, actual: Tensor, expected: Tensor) -> None:
    assert actual.shape == expected.shape, f"{name}: {list(actual.shape)}, expected {list(expected.shape)}"
    actual, expected = actual.double(), expected.double()
    assert torch.equal(actual.isfinite(), expected.isfinite()), f"{name}: other numbers are finite"
    actual, expected = (part.nan_to_num(0, 0, 0) for part in (actual, expected))
    difference = (actual - expected).abs().max() if actual.numel() else torch.tensor(0.0)
    assert difference <= 0.04 * (1 + expected.abs().max() if expected.numel() else 1), (
        f"{name}: off by {float(difference)}"
    )


def check_call(name: str, arguments: Arguments, threads: Any) -> bool:
    """Whether the call gave a result, which must equal the reference; otherwise it was refused."""
    op, reference, _ = OPS[name]
    try:
        copies = {argument: plain(value) for argument, value in arguments.items()}
    except Exception:  # noqa: BLE001  the op must refuse arguments that cannot be unpacked or copied
        copies = {}
    try:
        output = op(**arguments, threads=threads, impl="cpp")
    except UserError:
        return False
    assert copies, "arguments that cannot be read were taken"
    expected_output = reference(**copies)
    for number, (actual, expected) in enumerate(
        zip(*(x if isinstance(x, tuple) else (x,) for x in (output, expected_output)), strict=True)
    ):
        check_near(f"result {number}", actual, expected)
    if "cache" in arguments:
        actual, expected = arguments["cache"], copies["cache"]
        for part in ("keys", "values", "key_scales", "value_scales"):
            if (numbers := getattr(actual, part)) is not None:
                scale = 0.04 if numbers.dtype == torch.int8 else 1.0  # a code may differ by one
                check_near(part, numbers * scale, getattr(expected, part) * scale)
    return True


def sweep(name: str, examples: int, latest: Path) -> None:
    counts = {True: 0, False: 0}

    @settings(
        max_examples=examples,
        derandomize=True,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.data())
    def check(data: st.DataObject) -> None:
        arguments, changes = OPS[name][2](data), []
        threads: Any = data.draw(st.sampled_from([1, 2]))
        for _ in range(data.draw(st.integers(0, 3))):
            if data.draw(st.integers(0, 19)) == 0:
                threads = data.draw(st.sampled_from(NUMBERS))
                continue
            path = data.draw(st.sampled_from(list(leaves(arguments))))
            new = mutated(data, at(arguments, path))
            changes.append((path, new if not isinstance(new, Tensor) else (new.dtype, new.layout, tuple(new.shape))))
            try:
                arguments = put(arguments, path, new)
            except UserError:
                return
        latest.write_text(f"{name}, threads {threads}: {changes}")
        counts[check_call(name, arguments, threads)] += 1

    check()
    sys.stdout.write(f"{counts[True]} {counts[False]}\n")


if __name__ == "__main__":
    faulthandler.enable()
    torch.set_num_threads(1)
    for op in sys.argv[3:]:
        sweep(op, int(sys.argv[2]), Path(sys.argv[1]))
