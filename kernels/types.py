"""Arguments of the ops: weights, row layout and cache views, as frozen records of tensors.

Each record mirrors a struct of `abi.h` and makes it on demand (`.c`), so that Python and C++ share one vocabulary.
Activations are float32 throughout; matrices may be float32, bfloat16, float16 or quantised to 8 or 4 bits, the KV cache
float32, bfloat16, float16 or int8.

Shapes: B batch, T new tokens per sequence, N = B*T rows, H hidden, Hq and Hkv heads, D head_dim, C cache capacity.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from labkit.system.errors import UserError
from labkit.system.rounding import round_up

from .abi import CAttentionParams, CCache, CHeads, CLinear, CMlpWeights, CNorm, CQkvWeights, CRotary, CRows
from .build import same_in_cpp
from .codes import unpack_words

NORM_KINDS = ("none", "layer", "rms")
PLAIN_ACTIVATIONS = ("gelu", "gelu_tanh", "relu", "silu", "relu_squared")
ACTIVATIONS = (*PLAIN_ACTIVATIONS, "clamped_swiglu")  # the last one is of a gated MLP
MOST_REAL = torch.finfo(torch.float32).max
HEAD_DIM_LIMITS = {"cpp": 512, "reference": 512, "triton": 256}
HEAD_DIM_MULTIPLE = 16
same_in_cpp({"kMostDim": HEAD_DIM_LIMITS["cpp"]})
same_in_cpp(dict(zip(("kNoNorm", "kLayerNorm", "kRmsNorm"), range(len(NORM_KINDS)), strict=True)))
same_in_cpp({f"k{name.title().replace('_', '')}": number for number, name in enumerate(ACTIVATIONS)})


def float_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type of the unquantised weights of a model whose matrices are `dtype`, and of its KV cache unless that is
    quantised: bfloat16 for a model of codes (int8, or uint8 if packed), else `dtype` itself.
    """
    return torch.bfloat16 if dtype in (torch.int8, torch.uint8) else dtype


def padded_head_dim(head_dim: int) -> int:
    """Row length of the KV cache: head_dim rounded up to whole vectors."""
    return round_up(head_dim, HEAD_DIM_MULTIPLE)


def pointer(tensor: Tensor | None) -> int | None:
    """Address of a contiguous tensor's first element, or None."""
    if tensor is None:
        return None
    assert tensor.is_contiguous()
    return tensor.data_ptr()


@dataclass(frozen=True)
class Norm:
    """LayerNorm or RMSNorm over the last dimension; kind "none" returns its input unchanged."""

    kind: str = "none"
    weight: Tensor | None = None
    bias: Tensor | None = None
    eps: float = 0.0

    @cached_property
    def c(self) -> CNorm:
        return CNorm(NORM_KINDS.index(self.kind), self.eps, pointer(self.weight), pointer(self.bias))


NO_NORM = Norm()


@dataclass(frozen=True)
class Linear:
    """y = x W^T + b.

    `weight` is [outputs, inputs] with layout "rows". Layout "panels" is packed by gemm.pack for C++, and layout "words"
    by gemm.pack_words for a quantised matrix in Triton.

    A quantised matrix has codes of `bits` 8 or 4, from -2^(bits-1) to 2^(bits-1) - 1; as rows they are int8 in both
    cases. `group` inputs of a row share an entry of `scales`, float16 [outputs, groups, 1 or 2] or packed
    (gemm.pack_scales). With one number, the scale, a weight is scale * code. With two, the scale and a minimum, it is
    scale * (code + 2^(bits-1)) + minimum. activation_bits: 16, or 8 if the kernels may round activations to 8 bits.
    """

    weight: Tensor
    bias: Tensor | None
    outputs: int
    inputs: int
    layout: str
    scales: Tensor | None = None
    group: int = 0
    bits: int = 8
    activation_bits: int = 16

    @cached_property
    def c(self) -> CLinear:
        return self.c_with(self.bias)

    def c_with(self, bias: Tensor | None) -> CLinear:
        """The struct for C++, with another bias."""
        self.require("panels", "cpp")
        return CLinear(
            pointer(self.weight),
            pointer(bias),
            self.outputs,
            self.inputs,
            pointer(self.scales),
            self.group,
            self.bits,
            self.asymmetric,
            self.activation_bits,
        )

    @property
    def asymmetric(self) -> bool:
        """Whether a group has a minimum as well as a scale."""
        return self.scales is not None and self.scales.shape[2] == 2

    @property
    def on_gpu(self) -> Tensor:
        """The weight for Triton: [outputs, inputs], or codes as int32 words [outputs, words of a row, 1]."""
        if self.scales is None:
            self.require("rows", "triton")
            return self.weight
        self.require("words", "triton")
        return self.weight.view(torch.int32)

    def require(self, layout: str, impl: str) -> None:
        """Raises ValueError unless the weight has `layout`, which the kernels of `impl` read."""
        if self.layout != layout:
            raise UserError(
                f"the {impl} kernels take {self.weight_type} weights with layout {layout!r}, got {self.layout!r}; "
                f"use gemm.packed(linear, {impl!r})"
            )

    @property
    def weight_type(self) -> str:
        """The name of the C++ library and of the tiles for this matrix: its dtype, or "int8" if it is quantised."""
        return "int8" if self.scales is not None else str(self.weight.dtype).removeprefix("torch.")

    def floats(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The matrix [outputs, inputs] of layout "rows" or "words", computed in float32 and rounded to `dtype`."""
        rows = unpack_words(self.weight, self.inputs, self.bits) if self.layout == "words" else self.weight
        return self.scaled(rows, self.scales, dtype)

    def scaled(self, rows: Tensor, scales: Tensor | None, dtype: torch.dtype = torch.float32) -> Tensor:
        """Stored rows of the matrix, codes or numbers, and their scales [rows, groups, 1 or 2] or None -> [rows,
        inputs], computed in float32 and rounded to `dtype`.
        """
        if scales is None:
            return rows.to(dtype)
        if scales.shape[1] not in (1, self.inputs / self.group):  # the last group is smaller
            scales = scales.repeat_interleave(self.group, dim=1)[:, : self.inputs]
        grouped = rows.unflatten(1, (scales.shape[1], -1))
        scale, *minimum = scales.float().unsqueeze(2).unbind(3)
        numbers = torch.empty(grouped.shape, dtype=dtype, device=rows.device)
        if minimum:
            torch.add(scale * (grouped.float() + (1 << self.bits - 1)), minimum[0], out=numbers)
        else:
            torch.mul(grouped, scale, out=numbers)  # a GPU reads the codes and writes the numbers, and nothing else
        return numbers.flatten(1)


@dataclass(frozen=True)
class Heads:
    """Head counts and size; query head h reads KV head h // (query / kv)."""

    query: int
    kv: int
    dim: int

    @cached_property
    def c(self) -> CHeads:
        return CHeads(self.query, self.kv, self.dim, padded_head_dim(self.dim))


@dataclass(frozen=True)
class Rotary:
    """Tables of rotary embedding: cosine and sine [positions, dim / 2]. The pairs are (0, 1), (2, 3), … if interleaved,
    else (k, k + dim / 2). For layers with several rotations the tables are [tables, positions, dim / 2], and
    `QkvWeights.table` says which one a layer reads.
    """

    cosine: Tensor
    sine: Tensor
    interleaved: bool

    @cached_property
    def c(self) -> CRotary:
        several = self.cosine.dim() == 3
        stride = self.cosine.stride(0) if several else 0
        dim = 2 * self.cosine.shape[-1]
        return CRotary(pointer(self.cosine), pointer(self.sine), dim, int(self.interleaved), stride)

    @property
    def positions(self) -> int:
        return self.cosine.shape[-2]

    def table(self, number: int) -> "Rotary":
        """One of the tables alone."""
        several = self.cosine.dim() == 3
        return Rotary(self.cosine[number], self.sine[number], self.interleaved) if several else self


NO_ROTARY = CRotary(None, None, 0, 0, 0)


@dataclass(frozen=True)
class Rows:
    """The tokens of the N = batch * tokens rows, and the cache slots that they see."""

    batch: int
    tokens: int
    positions: Tensor  # int32 [N]
    first: Tensor  # int32 [B]: slots before it are padding
    visible: Tensor | None = None  # uint8 [B, stride]: 0 hides a slot; None: all from `first` on are seen
    key_positions: Tensor | None = None  # int32 [B, stride]: position of each slot's token, for ALiBi
    alike: int = 1  # sequences of a group, which are consecutive
    shared: int = 0  # first slots that are equal in a group: keys, values, positions, and what is visible

    @cached_property
    def c(self) -> CRows:
        table = self.visible if self.visible is not None else self.key_positions
        return CRows(
            self.batch,
            self.tokens,
            pointer(self.positions),
            pointer(self.first),
            pointer(self.visible),
            pointer(self.key_positions),
            0 if table is None else table.shape[1],
            self.alike,
            self.shared,
        )

    def require_slots(self, slots: int) -> None:
        """Raises UserError if a table has fewer slots than the rows see."""
        for name, table in (("visible", self.visible), ("key_positions", self.key_positions)):
            if table is not None and table.shape[1] < slots:
                raise UserError(f"rows.{name}: expected [{self.batch}, {slots} or more], got {list(table.shape)}")


@dataclass(frozen=True)
class LayerCache:
    """Keys and values of one layer."""

    keys: Tensor  # [B, Hkv, C, padded D]
    values: Tensor  # [B, Hkv, C, padded D]
    past: int  # slots that are filled before this call
    counter: Tensor | None = None  # int32 [1]: `past` on the device, for kernels that read it there
    key_scales: Tensor | None = None  # bfloat16 [B, Hkv, C] of int8 keys (int8_cache.py); None for floating keys
    value_scales: Tensor | None = None  # the same for values

    @cached_property
    def past_on_device(self) -> Tensor:
        """`counter`, or a new tensor of `past`."""
        if self.counter is not None:
            return self.counter
        return torch.full((1,), self.past, dtype=torch.int32, device=self.keys.device)

    @cached_property
    def c(self) -> CCache:
        scales = pointer(self.key_scales), pointer(self.value_scales)
        return CCache(pointer(self.keys), pointer(self.values), self.keys.shape[2], self.past, *scales)


@dataclass(frozen=True)
class QkvWeights:
    """Region 1: norm, then one projection to query, key and value heads in this order.

    q_norm, k_norm: RMS over D; with `whole_norms` over all query heads, and all key heads, together.
    table: of the rotary embedding's tables.
    """

    norm: Norm
    proj: Linear
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    qk_eps: float = 0.0
    table: int = 0
    whole_norms: bool = False

    @cached_property
    def c(self) -> CQkvWeights:
        norms = pointer(self.q_norm), pointer(self.k_norm), self.qk_eps
        return CQkvWeights(self.norm.c, self.proj.c, *norms, self.table, self.whole_norms)


@dataclass(frozen=True)
class AttentionParams:
    """Region 2: softmax(scale q k^T + slope * key position) v over the last `window` slots (None: all).

    cap: a score s = scale q k^T becomes cap * tanh(s / cap); None: no cap. Unless `causal`, a token sees later tokens
    too. A window then raises ValueError, because it ends at the token's slot.

    sinks: float32 [Hq], a score of each head that takes part in the softmax and has no value; None: no such score. It
    is neither scaled nor capped, and no mask hides it.
    """

    scale: float
    window: int | None = None
    slopes: Tensor | None = None
    causal: bool = True
    cap: float | None = None
    sinks: Tensor | None = None

    def __post_init__(self) -> None:
        if self.window is not None and not self.causal:
            raise UserError(
                f"got window = {self.window} with causal = False; a window ends at each token's own slot, so leave out "
                "one of the two"
            )
        if self.cap is not None and not (isinstance(self.cap, float) and 0 < self.cap <= MOST_REAL):
            raise UserError(f"got cap = {self.cap!r}, expected a finite float32 above 0, or None")

    @cached_property
    def c(self) -> CAttentionParams:
        vectors = pointer(self.slopes), self.cap or 0.0, pointer(self.sinks)
        return CAttentionParams(self.scale, self.window or 0, self.causal, *vectors)


@dataclass(frozen=True)
class MlpWeights:
    """Region 3: norm, first MLP matrix, activation. gated: activation(gate) * up, from one interleaved matrix.

    The activation "clamped_swiglu" of a gated MLP is that of GPT-OSS: gate * sigmoid(1.702 * gate) * (up + 1), where
    gate is at most 7, and up is between -7 and 7.

    addend_norm: norm of the attention's output, before it is added to the residual.
    """

    norm: Norm
    up: Linear
    activation: str
    gated: bool = False
    addend_norm: Norm = NO_NORM

    @cached_property
    def c(self) -> CMlpWeights:
        activation = ACTIVATIONS.index(self.activation)
        return CMlpWeights(self.norm.c, self.up.c, activation, int(self.gated), self.addend_norm.c)


def check_heads(heads: Heads, impl: str) -> None:
    """Raises ValueError for heads that the kernels of `impl` don't support."""
    most = HEAD_DIM_LIMITS[impl]
    if heads.dim > most or (impl == "triton" and heads.dim % 2):
        sizes = f"even sizes up to {most}, impl 'cpp' any up to {HEAD_DIM_LIMITS['cpp']}"
        raise UserError(
            f"head_dim is {heads.dim}; the {impl} kernels take " + (sizes if impl == "triton" else f"up to {most}")
        )
