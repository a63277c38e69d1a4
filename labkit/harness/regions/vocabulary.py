"""The regions of a layer as the harness knows them, derived from the list of the layer's ops."""

from __future__ import annotations

from labkit.kernels.layer_ops import LAYER_OPS, LayerOp
from labkit.stages import FUSED_REGIONS, Stage

OPS: dict[Stage, LayerOp] = {Stage(each.stage): each for each in LAYER_OPS}
REGIONS = tuple(OPS)
WITH_GEMM = tuple(region for region, each in OPS.items() if each.has_product)
FIRST_OF_OP = {each.op: Stage(each.stage) for each in reversed(LAYER_OPS)}
"""By op the first region that it is: the product behind attention and that behind the MLP are one op."""
OP_OF = {region: each.op for region, each in OPS.items() if FIRST_OF_OP[each.op] is region}
"""The ops that can be tried by themselves, by their first region."""
RUNGS: dict[str, tuple[Stage, ...]] = {
    "unfused": (),
    **{f"+ {count} {OPS[region].title}": FUSED_REGIONS[:count] for count, region in enumerate(FUSED_REGIONS, 1)},
    "+ own GEMM between": REGIONS,
}
"""The ladder: what is fused on each of its rungs."""
