"""The shapes on which ops are tested, timed and counted: shapes of a layer, and of a model around its layers."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Protocol

import torch

from .codes import SCALE_BYTES
from .int8_cache import SCALE_DTYPE
from .types import Heads, float_dtype

TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2, torch.int8: 1e-2}
"""Largest |got - want| / |want| (Frobenius norms) of a whole result against float64, by the type of the weights. The
rounding of int8 weights does not count, since both sides have the rounded weights."""

BIASES = frozenset({"qkv", "attn_out", "ff1", "ff2"})  # of a layer whose products all have a bias


@dataclass(frozen=True)
class Sizes:
    """Bytes of a number of each kind, as it is read from memory."""

    matrix: int
    vector: int  # of norms and biases
    cache: int  # of keys and values
    scale: int  # bytes of scales for each row of an int8 matrix
    cache_scale: int = 0  # bytes of the scale of a head's keys in a slot of an int8 cache; values have one too

    @classmethod
    def of(
        cls, dtype: torch.dtype, vectors: torch.dtype = torch.float32, kv_dtype: torch.dtype | None = None
    ) -> "Sizes":
        """The sizes of a model whose matrices are `dtype`. Vectors are float32 by default, as in the fused ops. Without
        `kv_dtype` the cache is not quantised.
        """
        scale, kv_dtype = SCALE_BYTES if dtype == torch.int8 else 0, kv_dtype or float_dtype(dtype)
        cache_scale = SCALE_DTYPE.itemsize if kv_dtype == torch.int8 else 0
        return cls(dtype.itemsize, vectors.itemsize, kv_dtype.itemsize, scale, cache_scale)

    def of_matrix(self, outputs: int, inputs: int, *, bias: bool) -> int:
        """Bytes of a matrix with its scales and its bias."""
        return outputs * (inputs * self.matrix + self.scale + (self.vector if bias else 0))


class OpCase(Protocol):
    """A case of an op that knows its least work.

    Activations are not counted as bytes: they are a few KB, and come from the cache of the core that wrote them. Only
    matrix products and attention are counted as FLOPs: everything else takes little time next to reading the bytes.
    """

    def bytes(self, rows: int, sizes: Sizes) -> int:
        """Bytes that must be read from memory for `rows` rows (in attention: sequences)."""

    def flops(self, rows: int) -> int:
        """Multiplications and additions of the products."""


@dataclass(frozen=True)
class ExpertsShape:
    """A mixture of experts. The width of an expert is `LayerShape.intermediate`.

    shared: width of the shared expert, an MLP that every row passes; 0: the mixture has none.
    shared_gate: whether its output is multiplied by a gate's.
    """

    count: int
    chosen: int
    shared: int = 0
    shared_gate: bool = False

    def read(self, rows: int) -> float:
        """The expected number of experts that some of the rows choose, if every choice is as likely as any other."""
        return self.count * (1 - (1 - self.chosen / self.count) ** rows)


@dataclass(frozen=True)
class LayerShape:
    """One layer of a model, and the vocabulary of its head."""

    model: str
    hidden: int
    heads: Heads
    intermediate: int
    vocabulary: int
    norm: str = "layer"
    activation: str = "gelu_tanh"
    gated: bool = False
    rotary: int = 0  # how many numbers of a head are rotated
    interleaved: bool = False
    alibi: bool = False
    biases: frozenset[str] = BIASES  # of "qkv", "attn_out", "router", "ff1", "ff2", "head"
    parallel: bool = False  # attention and MLP start from the same rows
    shared_norm: bool = False  # the MLP takes the rows of attention's norm
    qk_norm: bool = False  # queries and keys of each head have a norm of their own
    qk_norm_whole: bool = False  # it is over all query heads together, and all key heads
    sinks: bool = False  # each query head has a score without a value
    output_norms: bool = False  # the outputs of attention and MLP have norms
    experts: ExpertsShape | None = None  # in place of an MLP

    @property
    def norm_numbers(self) -> int:
        """Numbers of a norm over the hidden width: a weight, and in a layer norm a bias."""
        return self.hidden * (2 if self.norm == "layer" else 1)


@dataclass(frozen=True)
class ModelShape:
    """A model: layers that differ only in their windows and in what they have for an MLP, and what is around them.

    dense_layers: per layer, whether it has an MLP of `dense_size` instead of experts; empty: none has.
    """

    layer: LayerShape
    windows: tuple[int | None, ...]  # per layer; None: all slots are seen
    embedding: int  # width of the embedding; if it is not the layers' width, rows are projected in and out
    learned_positions: bool
    embedding_norm: bool
    final_norm: bool
    dense_layers: tuple[bool, ...] = ()
    dense_size: int = 0

    def layers(self) -> Iterator[tuple[LayerShape, int | None]]:
        """The shape and the window of each layer."""
        dense = replace(self.layer, intermediate=self.dense_size, experts=None)
        for window, is_dense in zip_longest(self.windows, self.dense_layers):
            yield dense if is_dense else self.layer, window

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
