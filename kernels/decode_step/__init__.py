"""A whole model step in one C call: embedding, all layers, LM head, with a clock stamp behind every stage.

The same pieces as the single ops, under one parallel region: no Python, no allocation and no thread wake-up between
stages. There is no reference implementation of its own; the reference is the sequence of reference ops.
"""

import ctypes
from ctypes import byref, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from .. import build
from ..all_reduce import Exchange
from ..types import (
    NO_ROTARY,
    AttentionParams,
    CCache,
    CHeads,
    CLayer,
    CLinear,
    CNorm,
    CRotary,
    CRows,
    Heads,
    Linear,
    MlpWeights,
    Norm,
    QkvWeights,
    Rotary,
    Rows,
    float_dtype,
    pointer,
)

STAGES_PER_LAYER = ("qkv", "attention", "attn_out", "mlp", "mlp_out", "residual")
ALL_REDUCE = "all_reduce"
__all__ = ["STAGES_PER_LAYER", "DecodeStep", "LayerWeights", "ModelWeights"]


class CModel(ctypes.Structure):
    _fields_ = [
        ("num_layers", c_int64),
        ("hidden", c_int64),
        ("intermediate", c_int64),
        ("heads", CHeads),
        ("parallel_residual", c_int32),
        ("residual_from_norm", c_int32),
        ("layers", c_void_p),
        ("embedding", c_void_p),
        ("embedding_size", c_int64),
        ("embedding_norm", CNorm),
        ("project_in", CLinear),
        ("positions", c_void_p),
        ("position_offset", c_int32),
        ("final_norm", CNorm),
        ("project_out", CLinear),
        ("head", CLinear),
        ("vocab_begin", c_int64),
        ("vocab", c_int64),
    ]


class CStepArgs(ctypes.Structure):
    _fields_ = [
        ("rows", CRows),
        ("rotary", CRotary),
        ("caches", c_void_p),
        ("past", c_int64),
        ("tokens", c_void_p),
        ("keep", c_int64),
        ("logits", c_void_p),
        ("argmax", c_void_p),
        ("hidden", c_void_p),
        ("inputs", c_void_p),
        ("outputs", c_void_p),
        ("stamps", c_void_p),
        ("workspace", c_void_p),
        ("threads", c_int32),
        ("exchange", c_void_p),
        ("own_logits", c_int32),
    ]


@dataclass(frozen=True)
class LayerWeights:
    """One layer's weights. `mlp.norm` is always the norm that the MLP's input goes through; with `shared_norm` it is
    region 1's, and the one-call step reuses region 1's rows. Biases of the two output matrices belong to the region
    after them.
    """

    qkv: QkvWeights
    attention: AttentionParams
    attn_out: Linear
    attn_bias: Tensor | None
    mlp: MlpWeights
    mlp_out: Linear
    mlp_bias: Tensor | None
    shared_norm: bool = False

    def c(self) -> CLayer:
        mlp = self.mlp.c
        if self.shared_norm:
            mlp = type(mlp)(Norm().c, mlp.up, mlp.activation, mlp.gated)
        return CLayer(
            self.qkv.c,
            self.attention.c,
            self.attn_out.c_with(self.attn_bias),
            mlp,
            self.mlp_out.c_with(self.mlp_bias),
        )


@dataclass(frozen=True)
class ModelWeights:
    """All weights of a model. `embedding` None: tied, looked up in the packed head. `positions` float32 [P, H].

    Of an encoder, which is embedded elsewhere: the layers and the final norm, and a head without rows.
    """

    layers: tuple[LayerWeights, ...]
    heads: Heads
    hidden: int
    intermediate: int
    embedding: Tensor | None
    embedding_size: int
    embedding_norm: Norm
    project_in: Linear | None
    positions: Tensor | None
    position_offset: int
    final_norm: Norm
    project_out: Linear | None
    head: Linear
    vocab: range  # the tokens whose rows embedding and head have
    vocab_size: int
    parallel_residual: bool
    residual_from_norm: bool

    @property
    def weight_type(self) -> str:
        """Of the layers' matrices; the head of a quantised model may be another."""
        return self.layers[0].qkv.proj.weight_type

    @property
    def cache_dtype(self) -> torch.dtype:
        """Of keys and values."""
        return float_dtype(self.layers[0].qkv.proj.weight.dtype)

    def stages(self, ranks: int) -> tuple[str, ...]:
        """Of one layer, in the order that they run in: among several ranks with their sums."""
        if ranks == 1:
            return STAGES_PER_LAYER
        *regions, mlp_out, residual = STAGES_PER_LAYER
        if not self.parallel_residual:
            regions.insert(regions.index("mlp"), ALL_REDUCE)
        return (*regions, mlp_out, ALL_REDUCE, residual)

    @cached_property
    def c_layers(self) -> ctypes.Array[CLayer]:
        return (CLayer * len(self.layers))(*(layer.c() for layer in self.layers))

    @cached_property
    def c(self) -> CModel:
        none = CLinear()
        return CModel(
            len(self.layers),
            self.hidden,
            self.intermediate,
            self.heads.c,
            self.parallel_residual,
            self.residual_from_norm,
            ctypes.addressof(self.c_layers),
            pointer(self.embedding),
            self.embedding_size,
            self.embedding_norm.c,
            self.project_in.c if self.project_in else none,
            pointer(self.positions),
            self.position_offset,
            self.final_norm.c,
            self.project_out.c if self.project_out else none,
            self.head.c,
            self.vocab.start,
            self.vocab_size,
        )


class DecodeStep:
    """Runs steps of one model; holds the library, the workspace and the stamps, and no model state.

    exchange: with the ranks that have the other parts of the model, which must run the same steps; its slots hold as
    many rows as a step has. One instance must not run two steps at a time.
    """

    def __init__(self, model: ModelWeights, exchange: Exchange | None = None) -> None:
        self.model, self.exchange = model, exchange
        self.library = build.load(model.weight_type)
        self.stages = model.stages(exchange.size if exchange else 1)
        self.stamps = np.zeros(3 + len(self.stages) * len(model.layers), dtype=np.int64)
        self._workspace = torch.empty(0, dtype=torch.uint8)
        self._sized_for = (0, 0)
        self._args = CStepArgs(
            stamps=self.stamps.ctypes.data, exchange=ctypes.addressof(exchange.c) if exchange else None
        )

    def __call__(
        self,
        tokens: Tensor,
        rows: Rows,
        rotary: Rotary | None,
        caches: "ctypes.Array[CCache]",
        past: int,
        *,
        keep: int,
        threads: int,
        logits: Tensor | None = None,
        argmax: Tensor | None = None,
        hidden: Tensor | None = None,
        own_logits: bool = False,
    ) -> None:
        """tokens int64 [B, T], contiguous, each in the vocabulary (the caller checks). Writes K and V of the new tokens
        at slot `past` of every cache, and for the last `keep` tokens of each sequence `logits` float32 [B*keep, V] or
        `argmax` int64 [B*keep] (-1: no logit is a number), and `hidden` float32 [B*keep, H] after the final norm if
        given. `own_logits`: fill in only the columns of this rank's vocabulary. Raises RuntimeError where another rank
        has ended.
        """
        args = self._args
        args.rows = rows.c
        args.rotary = rotary.c if rotary else NO_ROTARY
        args.caches = ctypes.addressof(caches)
        args.past = past
        args.tokens = tokens.data_ptr()
        args.keep = keep
        args.logits, args.argmax, args.hidden = pointer(logits), pointer(argmax), pointer(hidden)
        args.inputs, args.outputs = None, None
        args.threads, args.own_logits = threads, own_logits
        args.workspace = self._workspace_for(tokens.numel(), threads)
        self.library.labkit_step(byref(self.model.c), byref(args))
        if self.exchange is not None:
            self.exchange.check()

    def encode(self, inputs: Tensor, outputs: Tensor, rows: Rows, caches: "ctypes.Array[CCache]", threads: int) -> None:
        """inputs, outputs float32 [N, H], contiguous: rows that are embedded already through all layers and the final
        norm, without a head. Keys and values go into the caches from slot 0 on; layers may share one.
        """
        args = self._args
        args.rows = rows.c
        args.rotary = NO_ROTARY
        args.caches = ctypes.addressof(caches)
        args.past = args.keep = 0
        args.tokens = args.logits = args.argmax = args.hidden = None
        args.inputs, args.outputs = pointer(inputs), pointer(outputs)
        args.threads = threads
        args.workspace = self._workspace_for(len(inputs), threads)
        self.library.labkit_step(byref(self.model.c), byref(args))

    def _workspace_for(self, rows: int, threads: int) -> int:
        if rows > self._sized_for[0] or threads > self._sized_for[1]:
            size = self.library.labkit_workspace_bytes(byref(self.model.c), rows, threads)
            self._workspace = torch.empty(size + 64, dtype=torch.uint8)
            self._sized_for = (rows, threads)
        return -(-self._workspace.data_ptr() // 64) * 64
