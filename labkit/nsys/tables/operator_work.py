"""FLOPs and bytes of PyTorch's operators, counted from the shapes that a trace recorded.

Shapes: M, N, K of matrices; B batch, H heads, Q queries, K keys, D depth of a head. An operand counts once, regardless
of caches, and elements that an expanded tensor repeats count once. A multiplication with an addition is two FLOPs.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

DTYPE_BYTES = {  # of the types of numbers, by their names in traces
    **dict.fromkeys(("double", "int64", "long", "longint", "complexfloat", "float64", "unsignedlong"), 8),
    **dict.fromkeys(("float", "float32", "int", "int32", "tf32"), 4),
    **dict.fromkeys(("half", "bfloat16", "float16", "short", "int16"), 2),
    **dict.fromkeys(("byte", "char", "bool", "uint8", "int8", "unsignedchar", "signedchar"), 1),
    "complexdouble": 16,
}
PREFIX = re.compile(r"^c10::|^at::|^torch\.|\s|^std::")  # of these names


def element_bytes(dtype: str) -> int:
    """Bytes of a number of a type such as "Half", "c10::BFloat16" or "long int"; 0 for an unknown type."""
    name = PREFIX.sub("", dtype.replace(" ", "")).lower().removesuffix("_")
    return 1 if name.startswith(("float8", "fp8", "e4m3", "e5m2")) else DTYPE_BYTES.get(name, 0)


@dataclass(frozen=True)
class Inputs:
    """The arguments of an operator, one element each; () and "" for an argument that is not a tensor, or unknown."""

    dims: tuple[tuple[int, ...], ...]
    types: tuple[str, ...]
    strides: tuple[tuple[int, ...], ...]
    values: tuple[str, ...]

    def is_tensor(self, at: int) -> bool:
        return at < len(self.dims) and bool(self.dims[at]) and element_bytes(self.types[at]) > 0

    def bytes_of(self, at: int) -> int:
        """Bytes of a tensor, without repeated elements; 0 for an argument that is not a tensor."""
        if not self.is_tensor(at):
            return 0
        strides = self.strides[at] if at < len(self.strides) and len(self.strides[at]) == len(self.dims[at]) else ()
        shown = [size for axis, size in enumerate(self.dims[at]) if not strides or strides[axis] != 0]
        return prod(shown) * element_bytes(self.types[at])

    def value(self, at: int) -> str:
        return self.values[at] if at < len(self.values) else ""

    def numbers(self, at: int) -> tuple[int, ...]:
        """A list of integers such as "[2, 2]"."""
        return tuple(int(digits) for digits in re.findall(r"-?\d+", self.value(at)))


@dataclass(frozen=True)
class OperatorWork:
    """The work of one call of an operator."""

    flops: int  # 0: not counted for this operator
    bytes: int
    element_bytes: int  # of the numbers that it multiplies


def parsed(text: str) -> Inputs | None:
    """The inputs from a trace's JSON; None if it recorded none. Lists of tensors count as no tensor."""
    if not text:
        return None
    recorded: dict[str, Any] = json.loads(text)
    dims = recorded.get("dims") or []
    if not isinstance(dims, list):
        return None
    count = len(dims)
    types = [str(dtype) for dtype in recorded.get("types") or []]
    return Inputs(
        tuple(_sizes(sizes) for sizes in dims),
        tuple((types + [""] * count)[:count]),
        tuple(_sizes(sizes) for sizes in recorded.get("strides") or []),
        tuple(str(value) for value in recorded.get("values") or []),
    )


def _sizes(value: object) -> tuple[int, ...]:
    flat = isinstance(value, list) and all(isinstance(size, int) for size in value)
    return tuple(value) if flat else ()  # type: ignore[arg-type]


@lru_cache(maxsize=100_000)
def operator_work(name: str, text: str) -> OperatorWork | None:
    """The work of an operator with these inputs, given as a trace's JSON; None for an unknown operator."""
    inputs = parsed(text)
    if inputs is None:
        return None
    bare = name.removeprefix("aten::")
    for pattern, count in COUNTED:
        if re.fullmatch(pattern, bare):
            return count(bare, inputs)
    return None


def _matmul(name: str, inputs: Inputs) -> OperatorWork | None:
    """[B,] M x K times [B,] K x N. The first argument of addmm and baddbmm is the addend; linear's weight is N x K."""
    first = 1 if name.startswith(("addmm", "baddbmm")) else 0
    if not (inputs.is_tensor(first) and inputs.is_tensor(first + 1)):
        return None
    a, b = inputs.dims[first], inputs.dims[first + 1]
    if len(a) < 2 or len(b) < 2:
        return None
    n = b[-2] if name == "linear" else b[-1]
    size = element_bytes(inputs.types[first])
    rows, depth = prod(a[:-1]), a[-1]
    added = inputs.bytes_of(0) if first else inputs.bytes_of(2) if name == "linear" else 0
    flops = 2 * rows * n * depth + (rows * n if added else 0)
    moved = inputs.bytes_of(first) + inputs.bytes_of(first + 1) + added + rows * n * size
    return OperatorWork(flops, moved, size)


# Positions of the strides, paddings and dilations among the arguments.
CONVOLUTIONS = {
    "conv1d": (3, 4, 5), "conv2d": (3, 4, 5), "conv3d": (3, 4, 5), "convolution": (3, 4, 5), "_convolution": (3, 4, 5),
    "cudnn_convolution": (3, 2, 4), "miopen_convolution": (4, 3, 5), "mkldnn_convolution": (4, 3, 5),
}  # fmt: skip


def _convolution(name: str, inputs: Inputs) -> OperatorWork | None:
    """N x C x sizes with O x C/groups x sizes of the kernel. Transposed convolutions are not counted."""
    transposed = name in ("convolution", "_convolution") and inputs.value(6) == "True"
    if transposed or not (inputs.is_tensor(0) and inputs.is_tensor(1)):
        return None
    stride, padding, dilation = (inputs.numbers(at) for at in CONVOLUTIONS[name])
    image, kernel = inputs.dims[0], inputs.dims[1]
    axes = len(image) - 2
    if not stride or not dilation or axes < 1:
        return None
    stride, padding, dilation = (
        sizes * axes if len(sizes) == 1 else sizes for sizes in (stride, padding or (0,), dilation)
    )
    out = [
        (image[2 + axis] + 2 * padding[axis] - dilation[axis] * (kernel[2 + axis] - 1) - 1) // stride[axis] + 1
        for axis in range(axes)
    ]
    size = element_bytes(inputs.types[0])
    written = image[0] * kernel[0] * prod(out)
    return OperatorWork(2 * prod(kernel[1:]) * written, inputs.bytes_of(0) + inputs.bytes_of(1) + written * size, size)


def _attention(name: str, inputs: Inputs) -> OperatorWork | None:
    """Q . K and its product with V, for the pairs of queries and keys that a causal mask keeps.

    With a causal mask query i of Q sees the first i + 1 keys. _flash_attention_forward and _efficient_attention_forward
    have B x Q x H x D, the other operators B x H x Q x D.
    """
    if not all(inputs.is_tensor(at) and len(inputs.dims[at]) == 4 for at in range(3)):
        return None
    query, key, value = inputs.dims[:3]
    heads_last = name in HEADS_LAST
    heads, queries = (query[2], query[1]) if heads_last else (query[1], query[2])
    keys = key[1] if heads_last else key[2]
    causal = inputs.value(CAUSAL[name]) in ("True", "1", "2")
    seen = min(queries, keys)
    pairs = seen * (seen + 1) // 2 + (queries - seen) * keys if causal else queries * keys
    flops = 2 * query[0] * heads * pairs * (query[3] + value[3])
    size = element_bytes(inputs.types[0])
    moved = sum(inputs.bytes_of(at) for at in range(3)) + prod(query[:3]) * value[3] * size
    return OperatorWork(flops, moved, size)


HEADS_LAST = ("_flash_attention_forward", "_efficient_attention_forward")
CAUSAL = {  # the argument that says whether a mask is causal
    "scaled_dot_product_attention": 5,
    "_scaled_dot_product_flash_attention": 4,
    "_scaled_dot_product_efficient_attention": 6,
    "_scaled_dot_product_cudnn_attention": 6,
    "_flash_attention_forward": 8,
    "_efficient_attention_forward": 9,
}


def _elementwise(name: str, inputs: Inputs) -> OperatorWork | None:
    """Every tensor is read once, and the result is written once. Its shape is that of all tensors broadcast."""
    tensors = [at for at in range(len(inputs.dims)) if inputs.is_tensor(at)]
    if not tensors:
        return None
    size = element_bytes(inputs.types[tensors[0]])
    if name in COPIES:
        return OperatorWork(0, sum(inputs.bytes_of(at) for at in tensors[:2]), size)
    rank = max(len(inputs.dims[at]) for at in tensors)
    padded = [(1,) * (rank - len(inputs.dims[at])) + inputs.dims[at] for at in tensors]
    written = prod(max(sizes) for sizes in zip(*padded, strict=True)) * size
    return OperatorWork(0, sum(inputs.bytes_of(at) for at in tensors) + written, size)


def _of_rows(name: str, inputs: Inputs) -> OperatorWork | None:
    """Every tensor is read once, and a result with the first tensor's shape is written."""
    if not inputs.is_tensor(0):
        return None
    moved = sum(inputs.bytes_of(at) for at in range(len(inputs.dims))) + inputs.bytes_of(0)
    return OperatorWork(0, moved, element_bytes(inputs.types[0]))


def _embedding(name: str, inputs: Inputs) -> OperatorWork | None:
    """The table's rows at the indices, read and written. A row counts once for each index that names it."""
    if not (inputs.is_tensor(0) and inputs.is_tensor(1)):
        return None
    size = element_bytes(inputs.types[0])
    rows = prod(inputs.dims[1]) * prod(inputs.dims[0][1:]) * size
    return OperatorWork(0, 2 * rows + inputs.bytes_of(1), size)


COPIES = ("copy_",)
UNARY = r"(?:neg|exp|log|sqrt|rsqrt|sin|cos|tanh|sigmoid|silu|gelu|relu|abs|pow|clone|square|reciprocal|bitwise_not)_?"
BINARY = r"(?:add|sub|mul|div|maximum|minimum|where|lt|le|gt|ge|eq|ne|logical_\w+|clamp\w*|masked_fill|threshold\w*)_?"
ROWS = r"_softmax|_log_softmax|native_layer_norm|rms_norm|_fused_rms_norm|native_group_norm|(?:native|cudnn)_batch_norm"
COUNTED = (
    (r"(?:mm|addmm_?|bmm|baddbmm_?|linear|_scaled_mm)", _matmul),
    ("|".join(CONVOLUTIONS), _convolution),
    ("|".join(CAUSAL), _attention),
    (r"embedding", _embedding),
    (ROWS, _of_rows),
    (f"{UNARY}|{BINARY}|copy_", _elementwise),
)
