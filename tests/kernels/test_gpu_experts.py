"""Mixtures of experts in Triton on a GPU: small odd sizes, and the sizes of a published model."""

from dataclasses import replace

import pytest
import torch
from helpers.kernels.gpus import ON_GPU
from helpers.kernels.ops import WEIGHTS, Draw, distance, double, moved
from torch import Tensor

from labkit.kernels import ExpertMlps, Router, gpu, route
from labkit.kernels.experts.triton_impl import experts
from labkit.kernels.gemm import packed
from labkit.kernels.mlp_gemm.reference import mlp
from labkit.kernels.shapes import TOLERANCES
from labkit.kernels.types import NO_NORM, MlpWeights

DEVICE = "cuda"
SIZES = {"odd": (63, 50, 70, 5), "qwen1.5-moe": (2048, 1408, 2048, 60)}  # inputs, activations, outputs, experts
ROWS = (1, 3, 40, 700)  # a block for each choice, blocks of 16, and of 64 for the few experts
pytestmark = ON_GPU


def mixture(draw: Draw, inputs: int, inner: int, outputs: int, count: int) -> tuple[ExpertMlps, ExpertMlps]:
    """The same experts in float64 for the reference, and for Triton."""
    ups = [moved(draw.linear(inner, inputs, gated=True)[0], DEVICE) for _ in range(count)]
    downs = [moved(draw.linear(outputs, inner)[0], DEVICE) for _ in range(count)]
    regions = tuple(MlpWeights(NO_NORM, up, "silu", gated=True) for up in ups)
    plain = ExpertMlps(tuple(map(double, regions)), tuple(map(double, downs)))
    on_gpu = tuple(replace(region, up=packed(region.up, "triton")) for region in regions)
    return plain, ExpertMlps(on_gpu, tuple(packed(down, "triton") for down in downs))


def inputs_of(draw: Draw, rows: int, inputs: int, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, four experts of each, and their shares."""
    chosen = draw.normal(rows, count).topk(4).indices
    return draw.normal(rows, inputs).to(DEVICE), chosen.to(DEVICE), draw.normal(rows, 4).to(DEVICE)


def run(hidden: Tensor, chosen: Tensor, shares: Tensor, weights: ExpertMlps) -> Tensor:
    out = torch.empty(len(hidden), weights.outs[0].outputs, device=DEVICE)
    return experts(hidden, chosen, shares, weights, out, gpu.Launcher())


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("dtype", WEIGHTS.values(), ids=WEIGHTS)
def test_experts_equal_the_reference_and_repeat_every_bit(dtype: torch.dtype, sizes: tuple[int, int, int, int]) -> None:
    draw = Draw(dtype)
    plain, on_gpu = mixture(draw, *sizes)
    for rows in ROWS:
        hidden, chosen, shares = inputs_of(draw, rows, sizes[0], sizes[3])
        expected = torch.zeros(rows, sizes[2], dtype=torch.float64, device=DEVICE)
        for number, (region, down) in enumerate(zip(plain.regions, plain.outs, strict=True)):
            row, choice = (chosen == number).nonzero(as_tuple=True)
            if len(row):
                of_rows = shares[row, choice, None].double() * mlp(hidden[row].double(), region, down)
                expected.index_add_(0, row, of_rows)
        first, *others = (run(hidden, chosen, shares, on_gpu) for _ in range(5))
        assert distance(first, expected) <= TOLERANCES[dtype]
        assert all(torch.equal(other, first) for other in others)


@pytest.mark.parametrize("rows", [1, 4, 40])
def test_a_graph_of_choice_and_experts_follows_the_rows(rows: int) -> None:
    """Nothing waits for the host: what is captured with some choices computes with others."""
    draw, (inputs, inner, _, count) = Draw(torch.float16), SIZES["odd"]
    _, on_gpu = mixture(draw, inputs, inner, inputs, count)
    norm, matrix = moved(draw.norm("rms", inputs), DEVICE), moved(draw.linear(count, inputs)[0], DEVICE)
    router, hidden = Router(norm, matrix, 2, renormalised=True), draw.normal(rows, inputs).to(DEVICE)

    def layer() -> Tensor:
        normed, _, chosen, shares = route(hidden, None, None, router, impl="triton")
        return run(normed, chosen, shares, on_gpu)

    layer()  # compiles the kernels
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = layer()
    for _ in range(3):
        hidden.copy_(draw.normal(rows, inputs))
        graph.replay()
        assert torch.equal(captured, layer())
