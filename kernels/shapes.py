"""The shapes that ops are tested, timed and counted on: of a layer, and of a model around its layers."""

from dataclasses import dataclass
from typing import Protocol

import torch

from .int8_cache import SCALE_DTYPE
from .types import Heads, float_dtype

TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2, torch.int8: 1e-2}
"""Largest |got - want| / |want| (Frobenius norms) of a whole result against float64, by the type of the weights; what
int8 weights lose by rounding is not in it, since both sides have the rounded ones."""

SCALE_BYTES = 2  # float16
BIASES = frozenset({"qkv", "attn_out", "ff1", "ff2"})  # of a layer, where all its products have one


@dataclass(frozen=True)
class Sizes:
    """Bytes of a number of each kind, as it is read from memory.

    `scale`: bytes beside each row of an int8 matrix. `vector`: of norms and biases. `cache_scale`: bytes beside
    the keys of a head in a slot of an int8 cache, and beside its values.
    """

    matrix: int
    vector: int
    cache: int
    scale: int
    cache_scale: int = 0

    @classmethod
    def of(
        cls, dtype: torch.dtype, vectors: torch.dtype = torch.float32, kv_dtype: torch.dtype | None = None
    ) -> "Sizes":
        """Those of a model whose matrices are `dtype`: float32 vectors, as the fused ops keep them, and a cache of what
        is not quantised, unless given.
        """
        scale, kv_dtype = SCALE_BYTES if dtype == torch.int8 else 0, kv_dtype or float_dtype(dtype)
        cache_scale = SCALE_DTYPE.itemsize if kv_dtype == torch.int8 else 0
        return cls(dtype.itemsize, vectors.itemsize, kv_dtype.itemsize, scale, cache_scale)

    def of_matrix(self, outputs: int, inputs: int, *, bias: bool) -> int:
        """Bytes of a matrix with its scales and its bias."""
        return outputs * (inputs * self.matrix + self.scale + (self.vector if bias else 0))


class OpCase(Protocol):
    """A case of an op that knows what it has to do at least.

    Activations are not counted as bytes: a few KB, they come from the cache of the core that wrote them. Only matrix
    products and attention are counted as FLOPs: whatever else an op computes is small beside reading its bytes.
    """

    def bytes(self, rows: int, sizes: Sizes) -> int:
        """Bytes that must be read from memory for `rows` rows (in attention: sequences)."""

    def flops(self, rows: int) -> int:
        """Multiplications and additions of the products."""


@dataclass(frozen=True)
class LayerShape:
    """One layer of a model, and the vocabulary of its head.

    `rotary`: how many numbers of a head turn; `parallel`: attention and MLP start from the same rows; `biases`: of
    "qkv", "attn_out", "ff1", "ff2", "head"; `shared_norm`: the MLP takes the rows that attention's norm made;
    `qk_norm`: queries and keys of each head have a norm of their own.
    """

    model: str
    hidden: int
    heads: Heads
    intermediate: int
    vocabulary: int
    norm: str = "layer"
    activation: str = "gelu_tanh"
    gated: bool = False
    rotary: int = 0
    interleaved: bool = False
    alibi: bool = False
    biases: frozenset[str] = BIASES
    parallel: bool = False
    shared_norm: bool = False
    qk_norm: bool = False

    @property
    def norm_numbers(self) -> int:
        """Numbers of a norm over the hidden width: a weight, and in a layer norm a bias."""
        return self.hidden * (2 if self.norm == "layer" else 1)


@dataclass(frozen=True)
class ModelShape:
    """A model: its layers, which differ in nothing but their windows (None: all slots are seen), and what is around
    them. `embedding` is the width of the embedding; where it is not that of the layers, rows are projected in and out.
    """

    layer: LayerShape
    windows: tuple[int | None, ...]
    embedding: int
    learned_positions: bool
    embedding_norm: bool
    final_norm: bool

    @property
    def projected(self) -> bool:
        return self.embedding != self.layer.hidden


REAL = (
    LayerShape("gpt2", 768, Heads(12, 12, 64), 3072, 50257),
    LayerShape(
        "gpt-j-6b",
        4096,
        Heads(16, 16, 256),
        16384,
        50400,
        rotary=64,
        interleaved=True,
        biases=frozenset({"ff1", "ff2", "head"}),
        parallel=True,
        shared_norm=True,
    ),
    LayerShape("bloom-7b1", 4096, Heads(32, 32, 128), 16384, 250880, alibi=True),
    LayerShape(
        "llama-2-7b", 4096, Heads(32, 32, 128), 11008, 32000, "rms", "silu", gated=True, rotary=128, biases=frozenset()
    ),
)
ODD = (
    LayerShape("odd", 63, Heads(3, 3, 20), 100, 131),
    LayerShape("odd-gated", 72, Heads(6, 2, 20), 50, 77, "rms", "silu", gated=True, rotary=12, biases=frozenset()),
    LayerShape("odd-pairs", 60, Heads(2, 1, 34), 130, 90, activation="gelu", rotary=8, interleaved=True, parallel=True),
    LayerShape("odd-alibi", 65, Heads(5, 5, 12), 33, 61, activation="relu", alibi=True),
)
