"""The ops of a layer in running order: one list for counting a step's bytes and FLOPs and for comparing its regions.

A new op of the layer has its folder and a row here. Its stage has its name in `labkit.stages`, and `kernels/layer.py`
has its place in the sequence.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor

from labkit.stages import Stage

from .attention import attention
from .attention.cases import AttentionCase
from .attention.reference import attention as unfused_attention
from .checks import unchecked
from .experts import experts
from .experts.cases import ExpertsCase, RouteCase, shared_case, shared_shape
from .experts.reference import experts as unfused_experts
from .gemm import gemm
from .gemm.cases import cases_of
from .mlp_gemm import mlp_gemm
from .mlp_gemm.cases import MlpCase
from .mlp_gemm.reference import mlp_gemm as unfused_mlp_gemm
from .qkv_gemm import qkv_gemm
from .qkv_gemm.cases import QkvCase
from .qkv_gemm.reference import qkv_gemm as unfused_qkv_gemm
from .residual_add import residual_add
from .residual_add.cases import ResidualCase
from .residual_add.reference import residual_add as unfused_residual_add
from .route import route
from .route.reference import route as unfused_route
from .shapes import LayerShape, OpCase
from .types import Linear

Multiply = Callable[[Tensor, Linear], Tensor]


@dataclass(frozen=True)
class Pass:
    """`tokens` new tokens of a sequence after `past` tokens. A layer with a window sees the last `window` tokens."""

    past: int
    tokens: int = 1
    window: int | None = None


@dataclass(frozen=True)
class LayerOp:
    """An op as a stage of the layer."""

    stage: Stage
    title: str
    fused: Callable[..., Any]  # its public function
    unfused: Callable[[Multiply], Callable[..., Any]]  # returns its reference, which uses the given product
    case: Callable[[LayerShape, Pass], OpCase]
    weights: tuple[str, ...]  # the fields of `LayerWeights`, or with "mlp." of its MLP, that the op reads
    has_product: bool  # whether it multiplies with a matrix

    @property
    def op(self) -> str:
        """The name of its folder and of its public function."""
        return self.fused.__name__

    @property
    def trusting(self) -> Callable[..., Any]:
        """`fused` without checks, for the engine's own arguments."""
        return unchecked(self.fused)


LAYER_OPS = (
    LayerOp(
        stage=Stage.QKV,
        title="QKV",
        fused=qkv_gemm,
        unfused=lambda multiply: partial(unfused_qkv_gemm, multiply=multiply),
        case=lambda shape, _: QkvCase(shape),
        weights=("qkv",),
        has_product=True,
    ),
    LayerOp(
        stage=Stage.ATTENTION,
        title="attention",
        fused=attention,
        unfused=lambda _: unfused_attention,
        case=lambda shape, at: AttentionCase(shape, at.past, at.tokens, at.window),
        weights=("attention",),
        has_product=False,
    ),
    LayerOp(
        stage=Stage.ATTN_OUT,
        title="attention output",
        fused=gemm,
        unfused=lambda multiply: multiply,
        case=lambda shape, _: replace(cases_of(shape)[0], bias=False),  # the next region adds the bias
        weights=("attn_out",),
        has_product=True,
    ),
    LayerOp(
        stage=Stage.MLP,
        title="MLP",
        fused=mlp_gemm,
        unfused=lambda multiply: partial(unfused_mlp_gemm, multiply=multiply),
        case=lambda shape, _: MlpCase(shape),
        weights=("mlp.region",),
        has_product=True,
    ),
    LayerOp(
        stage=Stage.MLP_OUT,
        title="MLP output",
        fused=gemm,
        unfused=lambda multiply: multiply,
        case=lambda shape, _: replace(cases_of(shape)[1], bias=False),
        weights=("mlp.out",),
        has_product=True,
    ),
    LayerOp(
        stage=Stage.RESIDUAL,
        title="bias and residual",
        fused=residual_add,
        unfused=lambda _: unfused_residual_add,
        case=lambda shape, _: ResidualCase(shape),
        weights=("mlp.out_bias", "mlp.out_norm"),
        has_product=False,
    ),
)
OF_MLP = (Stage.MLP, Stage.MLP_OUT)
MIXTURE_OPS = (
    LayerOp(
        stage=Stage.ROUTE,
        title="choice of experts",
        fused=route,
        unfused=lambda _: unfused_route,
        case=lambda shape, _: RouteCase(shape),
        weights=("mlp.router",),
        has_product=True,
    ),
    LayerOp(
        stage=Stage.EXPERTS,
        title="experts",
        fused=experts,
        unfused=lambda _: unfused_experts,
        case=lambda shape, _: ExpertsCase(shape),
        weights=("mlp.experts",),
        has_product=True,
    ),
)
"""What a layer with experts has in place of the ops of an MLP."""


def layer_cases(shape: LayerShape, at: Pass) -> dict[str, OpCase]:
    """The ops of one layer by their stage."""
    dense: dict[str, OpCase] = {op.stage: op.case(shape, at) for op in LAYER_OPS}
    if shape.experts is None:
        return dense
    of_mixture: dict[str, OpCase] = {op.stage: op.case(shape, at) for op in MIXTURE_OPS}
    if shape.experts.shared:
        product = cases_of(shared_shape(shape))[1]
        of_mixture |= {Stage.MLP: shared_case(shape), Stage.MLP_OUT: replace(product, bias=False)}
    cases: dict[str, OpCase] = {}
    for stage, case in dense.items():
        if stage == Stage.MLP:
            cases |= of_mixture
        if stage not in OF_MLP:
            cases[stage] = case
    return cases
