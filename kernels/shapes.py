"""Layer shapes that the cases of all ops are made of: four published models, and one that no tile divides."""

from dataclasses import dataclass

import torch

from .types import Heads

TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2, torch.int8: 1e-2}
"""Largest |got - want| / |want| (Frobenius norms) of a whole result against float64, by the type of the weights; what
int8 weights lose by rounding is not in it, since both sides have the rounded ones."""


@dataclass(frozen=True)
class LayerShape:
    """One layer of a model.

    `rotary`: how many numbers of a head turn; `parallel`: attention and MLP start from the same rows; `biases`: of
    "qkv", "attn_out", "ff1", "ff2", "head".
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
    biases: tuple[str, ...] = ("qkv", "attn_out", "ff1", "ff2")
    parallel: bool = False


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
        biases=("ff1", "ff2", "head"),
        parallel=True,
    ),
    LayerShape("bloom-7b1", 4096, Heads(32, 32, 128), 16384, 250880, alibi=True),
    LayerShape("llama-2-7b", 4096, Heads(32, 32, 128), 11008, 32000, "rms", "silu", gated=True, rotary=128, biases=()),
)
ODD = (
    LayerShape("odd", 63, Heads(3, 3, 20), 100, 131),
    LayerShape("odd-gated", 72, Heads(6, 2, 20), 50, 77, "rms", "silu", gated=True, rotary=12, biases=()),
    LayerShape("odd-pairs", 60, Heads(2, 1, 34), 130, 90, activation="gelu", rotary=8, interleaved=True, parallel=True),
    LayerShape("odd-alibi", 65, Heads(5, 5, 12), 33, 61, activation="relu", alibi=True),
)


def stored_bytes(outputs: int, inputs: int, dtype: torch.dtype, *, bias: bool) -> int:
    """Bytes of a matrix as it is read: its elements, a scale per row with int8, and a float32 bias."""
    scales = 4 * outputs if dtype == torch.int8 else 0
    return outputs * inputs * dtype.itemsize + scales + (4 * outputs if bias else 0)
