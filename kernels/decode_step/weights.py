"""The weights of a range of layers, the embedding and the head, as kernels read them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import c_float
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count

import torch
from torch import Tensor

from labkit.stages import Stage

from ..abi import CHeads, CLayer, CLinear, CNorm
from ..build import INT, LONG, POINTER, fields, mirrors, same_in_cpp
from ..expert_store import ExpertsOfLayer, ExpertStore
from ..layer_ops import LAYER_OPS
from ..types import AttentionParams, Heads, Linear, Norm, QkvWeights, float_dtype, pointer
from .mlps import DenseMlp, MixtureMlp

STAGES_PER_LAYER = tuple(op.stage for op in LAYER_OPS)
_MLP = STAGES_PER_LAYER.index(Stage.MLP)
_BEFORE_MLP, _FROM_MLP = STAGES_PER_LAYER[:_MLP], STAGES_PER_LAYER[_MLP:]
OF_MIXTURE = (Stage.ROUTE, Stage.EXPERTS)
LAYER_STAGES = (Stage.FETCH, Stage.FETCH_KV, *_BEFORE_MLP, Stage.ALL_REDUCE, *OF_MIXTURE, *_FROM_MLP)
same_in_cpp({"kLayerStages": len(LAYER_STAGES)})
same_in_cpp(
    {f"int(LayerStage::k{stage.title().replace('_', '')})": number for number, stage in enumerate(LAYER_STAGES)}
)


@mirrors("Embedding")
class CEmbedding(ctypes.Structure):
    _fields_ = fields(
        (POINTER, "table"),
        (CLinear, "packed"),
        (LONG, "size begin rows"),
        (CNorm, "norm"),
        (CLinear, "project_in"),
        (POINTER, "positions"),
        (INT, "position_offset"),
        (c_float, "scale"),
        (INT, "norm_first"),
    )


@mirrors("Head")
class CHead(ctypes.Structure):
    _fields_ = fields((CLinear, "project_out matrix"), (LONG, "begin vocab"), (c_float, "cap"))


@mirrors("Model")
class CModel(ctypes.Structure):
    _fields_ = fields(
        (LONG, "num_layers hidden intermediate"),
        (CHeads, "heads"),
        (INT, "parallel_residual residual_from_norm"),
        (POINTER, "layers"),
        (CEmbedding, "embedding"),
        (CNorm, "final_norm"),
        (CHead, "head"),
    )


@dataclass(frozen=True)
class LayerWeights:
    """One layer's weights.

    mlp: an MLP, whose `region.norm` is always the norm of its input, or a mixture of experts.
    attn_bias: bias of `attn_out`, which the next region adds.
    shared_norm: the norm of the MLP's input is that of region 1, and the one-call step takes region 1's rows.
    """

    qkv: QkvWeights
    attention: AttentionParams
    attn_out: Linear
    attn_bias: Tensor | None
    mlp: DenseMlp | MixtureMlp
    shared_norm: bool = False

    @property
    def dense(self) -> DenseMlp:
        """The MLP of a layer without experts."""
        assert isinstance(self.mlp, DenseMlp)
        return self.mlp

    @property
    def matrices(self) -> dict[str, Linear]:
        """The matrices by canonical name."""
        return {"qkv.weight": self.qkv.proj, "attn_out.weight": self.attn_out, **self.mlp.matrices}

    def with_matrices(self, at: Callable[[Tensor], Tensor]) -> LayerWeights:
        """The same layer with its matrices and their scales replaced by `at(tensor)`."""

        def moved(linear: Linear) -> Linear:
            return replace(
                linear, weight=at(linear.weight), scales=None if linear.scales is None else at(linear.scales)
            )

        return replace(
            self,
            qkv=replace(self.qkv, proj=moved(self.qkv.proj)),
            attn_out=moved(self.attn_out),
            mlp=self.mlp.with_matrices(moved),
        )

    def c(self) -> CLayer:
        mlp = self.mlp.c(own_norm=not self.shared_norm)
        mixture = self.mlp.c_mixture
        address = None if mixture is None else ctypes.addressof(mixture)
        return CLayer(self.qkv.c, self.attention.c, self.attn_out.c_with(self.attn_bias), mlp, address)


@dataclass(frozen=True)
class EmbeddingWeights:
    """Tokens in, rows out: norm of scale * row of the token, projected, plus positions[position + position_offset].

    norm_first: the positions are added to the normed rows instead.
    """

    table: Tensor | None  # [rows, size]; None: the rows are in `packed`
    packed: Linear | None  # the matrix of a tied LM head
    size: int
    vocab: range  # the tokens whose rows this rank holds
    norm: Norm
    project_in: Linear | None = None
    positions: Tensor | None = None  # float32 [P, H]
    position_offset: int = 0
    scale: float = 1.0
    norm_first: bool = False

    @property
    def c(self) -> CEmbedding:
        return CEmbedding(
            pointer(self.table),
            self.packed.c if self.packed else CLinear(),
            self.size,
            self.vocab.start,
            len(self.vocab),
            self.norm.c,
            self.project_in.c if self.project_in else CLinear(),
            pointer(self.positions),
            self.position_offset,
            self.scale,
            int(self.norm_first),
        )


@dataclass(frozen=True)
class HeadWeights:
    """Rows in, logits out. cap: a logit x becomes cap * tanh(x / cap); None: no cap."""

    matrix: Linear
    vocab: range  # the tokens whose logits this rank computes
    vocab_size: int  # of all ranks
    project_out: Linear | None = None
    cap: float | None = None

    @property
    def c(self) -> CHead:
        project_out = self.project_out.c if self.project_out else CLinear()
        return CHead(project_out, self.matrix.c, self.vocab.start, self.vocab_size, self.cap or 0.0)


@dataclass(frozen=True)
class ModelWeights:
    """The weights of a range of layers."""

    layers: tuple[LayerWeights, ...]
    heads: Heads
    hidden: int
    intermediate: int
    embedding: EmbeddingWeights | None  # None: the range begins with rows
    final_norm: Norm  # of the rows after the last layer; kind "none" if other layers of the model follow
    head: HeadWeights | None  # None: the range ends with rows
    parallel_residual: bool
    residual_from_norm: bool

    @property
    def weight_type(self) -> str:
        """The type of the kernels that read these weights: int8 if any matrix has codes. Such kernels read matrices in
        bfloat16, too.
        """
        matrices = [matrix for layer in self.layers for matrix in layer.matrices.values()]
        matrices += [] if self.head is None else [self.head.matrix]
        return next((matrix.weight_type for matrix in matrices if matrix.scales is not None), matrices[0].weight_type)

    @property
    def cache_dtype(self) -> torch.dtype:
        """The type of unquantised keys and values."""
        return float_dtype(self.layers[0].qkv.proj.weight.dtype)

    @cached_property
    def mixtures(self) -> tuple[MixtureMlp, ...]:
        """The mixtures of the layers that have one, all of the same sizes."""
        return tuple(layer.mlp for layer in self.layers if isinstance(layer.mlp, MixtureMlp))

    @property
    def expert_store(self) -> ExpertStore | None:
        """The store of the experts of all layers; None: they are resident, or streamed with their layers."""
        return next((mixture.stored.store for mixture in self.mixtures if mixture.stored), None)

    def with_experts_in(self, store: ExpertStore) -> ModelWeights:
        """The same weights, with the experts of all layers in a store."""

        numbers = count()

        def stored(layer: LayerWeights) -> LayerWeights:
            if not isinstance(layer.mlp, MixtureMlp):
                return layer
            return replace(layer, mlp=replace(layer.mlp, stored=ExpertsOfLayer(store, next(numbers))))

        return replace(self, layers=tuple(map(stored, self.layers)))

    @property
    def experts_of_a_row(self) -> int:
        """Number of experts that a row chooses in each mixture; 0: no layer has one."""
        return next((mixture.router.chosen for mixture in self.mixtures), 0)

    def stages(self, ranks: int, streamed: bool = False, kv_streamed: bool = False) -> tuple[Stage, ...]:
        """The stages of all kinds of layers in running order. Several ranks have sums. Streams of layers, or of keys
        and values, have waits, and so have stores of experts.
        """
        if streamed or kv_streamed:
            return (*(Stage.FETCH,) * streamed, *(Stage.FETCH_KV,) * kv_streamed, *self.stages(ranks))
        regions, of_mlp, mixtures = list(_BEFORE_MLP), list(_FROM_MLP[:-1]), self.mixtures
        if mixtures:
            of_mixture = OF_MIXTURE if mixtures[0].stored is None else (Stage.ROUTE, Stage.FETCH, Stage.EXPERTS)
            dense = mixtures[0].shared is not None or len(mixtures) < len(self.layers)
            of_mlp = [*of_mixture, *(of_mlp if dense else ())]
        summed = [Stage.ALL_REDUCE] * (ranks > 1)
        between = [] if self.parallel_residual else summed
        return (*regions, *between, *of_mlp, *summed, _FROM_MLP[-1])

    @cached_property
    def c_layers(self) -> ctypes.Array[CLayer]:
        return (CLayer * len(self.layers))(*(layer.c() for layer in self.layers))

    @cached_property
    def c(self) -> CModel:
        return CModel(
            len(self.layers),
            self.hidden,
            self.intermediate,
            self.heads.c,
            self.parallel_residual,
            self.residual_from_norm,
            ctypes.addressof(self.c_layers),
            self.embedding.c if self.embedding else CEmbedding(),
            self.final_norm.c,
            self.head.c if self.head else CHead(),
        )
