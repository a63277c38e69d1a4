"""A mixture of experts in Triton. The host never waits for the choice, so a CUDA graph can hold all of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from ..gemm.triton_impl import codes, tile_type
from ..gpu import FEW_ROWS, Launcher, dot_type, optional
from ..tuned import Tile
from ..types import Linear, float_dtype
from .mlps import ExpertMlps
from .triton_kernels import experts_down, experts_sum, experts_up, sort_choices

ROWS_AT_ONCE = 4096  # of a prompt: the memory of activations and outputs grows with the rows
MANY_ROWS = 64  # of an expert in a block of a prompt
TILE = Tile(rows=1, depth=1024)


@dataclass(frozen=True)
class Blocks:
    """Choices [M, K] int64, in blocks that pass an expert together: `size` choices at most, `most` blocks at most.

    begins, order, places: int32, as `sort_choices` writes them; unused with blocks of one choice.
    """

    chosen: Tensor
    experts: int
    size: int
    most: int
    begins: Tensor
    order: Tensor
    places: Tensor

    @property
    def arguments(self) -> dict[str, object]:
        """What a kernel with a product takes to find its block."""
        return {
            "chosen_ptr": self.chosen,
            "begins_ptr": self.begins,
            "E": self.experts,
            "EP": triton.next_power_of_2(self.experts),
            "MP": self.size,
        }


def experts(
    hidden: Tensor,
    chosen: Tensor,
    shares: Tensor,
    weights: ExpertMlps,
    out: Tensor,
    launch: Launcher,
    residual: Tensor | None = None,
) -> Tensor:
    """out [M, O] float32 = residual + the sum of share * MLP(row) over a row's choices; see the op's contract."""
    for begin in range(0, len(hidden), ROWS_AT_ONCE):
        some = slice(begin, begin + ROWS_AT_ONCE)
        blocks = blocks_of(chosen[some], len(weights.regions), launch)
        outputs = _outputs(hidden[some], blocks, weights, launch)
        _sum(outputs, shares[some], blocks, out[some], launch, None if residual is None else residual[some])
    return out


def blocks_of(chosen: Tensor, experts: int, launch: Launcher) -> Blocks:
    """The blocks of these choices. The experts of one row are all different, so each choice is a block. Otherwise a
    block is as large as the matrix unit needs it, and larger where an expert has many rows on the average.
    """
    count = chosen.numel()
    if len(chosen) == 1:
        return Blocks(chosen, experts, 1, count, chosen, chosen, chosen)
    size = FEW_ROWS if count <= FEW_ROWS * experts else MANY_ROWS
    most = min(count, (count + min(count, experts) * (size - 1)) // size)  # the last block of an expert may have one
    begins, order, places = (
        torch.empty(length, dtype=torch.int32, device=chosen.device) for length in (experts + 1, count, count)
    )
    launch(
        sort_choices,
        (experts,),
        TILE,
        chosen_ptr=chosen,
        begins_ptr=begins,
        order_ptr=order,
        places_ptr=places,
        C=count,
        E=experts,
        BLOCK=TILE.depth,
    )
    return Blocks(chosen, experts, size, most, begins, order, places)


def _outputs(hidden: Tensor, blocks: Blocks, weights: ExpertMlps, launch: Launcher) -> Tensor:
    """The outputs of the experts, float32 [C, O]: of each choice, by its place in the order of the blocks."""
    region, (ups, downs), chosen = weights.regions[0], weights.stacks, blocks.chosen
    width, outputs = region.up.outputs // (2 if region.gated else 1), weights.outs[0].outputs
    act = torch.empty(chosen.numel(), width, dtype=float_dtype(ups.weight.dtype), device=hidden.device)
    tile = launch.batch_tile("experts_up", tile_type(ups), blocks.size, region.up.outputs, ups.inputs)
    launch(
        experts_up,
        (blocks.most, triton.cdiv(region.up.outputs, tile.rows)),
        tile,
        act_ptr=act,
        order_ptr=blocks.order,
        N=width,
        CHOICES=chosen.shape[1],
        ACTIVATION=region.activation,
        GATED=region.gated,
        **_product(hidden, ups, tile),
        **blocks.arguments,
    )
    out = torch.empty(chosen.numel(), outputs, device=hidden.device)
    tile = launch.batch_tile("experts_down", tile_type(downs), blocks.size, outputs, downs.inputs)
    launch(
        experts_down,
        (blocks.most, triton.cdiv(outputs, tile.rows)),
        tile,
        out_ptr=out,
        N=outputs,
        **_product(act, downs, tile),
        **blocks.arguments,
    )
    return out


def _product(x: Tensor, stack: Linear, tile: Tile) -> dict[str, object]:
    """What a kernel takes for a product with the matrices of the experts."""
    return {
        "x_ptr": x,
        "w_ptr": stack.on_gpu,
        "scales_ptr": optional(stack.scales, x),
        "bias_ptr": optional(stack.bias, x),
        "K": stack.inputs,
        "CODES": codes(stack),
        "BIAS": stack.bias is not None,
        "BN": tile.rows,
        "BK": tile.depth,
        "AHEAD": min(tile.stages, 2),
        "DOT": dot_type(stack.weight.dtype),
    }


def _sum(
    outputs: Tensor, shares: Tensor, blocks: Blocks, out: Tensor, launch: Launcher, residual: Tensor | None
) -> None:
    rows, width = out.shape
    choices = shares.shape[1]
    launch(
        experts_sum,
        (rows, triton.cdiv(width, TILE.depth)),
        TILE,
        out_ptr=out,
        residual_ptr=optional(residual, out),
        outputs_ptr=outputs,
        chosen_ptr=blocks.chosen,
        shares_ptr=shares,
        places_ptr=blocks.places,
        N=width,
        E=blocks.experts,
        CHOICES=choices,
        RESIDUAL=residual is not None,
        SORTED=blocks.size > 1,
        KP=triton.next_power_of_2(choices),
        BLOCK=TILE.depth,
    )
