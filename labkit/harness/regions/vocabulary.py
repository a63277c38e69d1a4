"""The harness's regions of a layer, derived from the list of the layer's ops."""

from __future__ import annotations

from labkit.kernels.layer_ops import LAYER_OPS, LayerOp
from labkit.stages import FUSED_REGIONS, Stage

OPS: dict[Stage, LayerOp] = {Stage(op.stage): op for op in LAYER_OPS}
REGIONS = tuple(OPS)
WITH_GEMM = tuple(region for region, op in OPS.items() if op.has_product)
FIRST_OF_OP = {op.op: Stage(op.stage) for op in reversed(LAYER_OPS)}
"""The first region of each op. The products after attention and after the MLP are the same op."""
OP_OF = {region: op.op for region, op in OPS.items() if FIRST_OF_OP[op.op] is region}
"""The ops that can be tried alone, by their first region."""
RUNGS: dict[str, tuple[Stage, ...]] = {
    "unfused": (),
    **{f"+ {count} {OPS[region].title}": FUSED_REGIONS[:count] for count, region in enumerate(FUSED_REGIONS, 1)},
    "+ own GEMM between": REGIONS,
}
"""The ladder: the fused regions of each rung."""
