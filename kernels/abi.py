"""The structs of `abi.h` in ctypes. The records of `types` make them on demand."""

import ctypes
from ctypes import c_float

from .build import INT, LONG, POINTER, fields, mirrors


@mirrors("Norm")
class CNorm(ctypes.Structure):
    _fields_ = fields((INT, "kind"), (c_float, "eps"), (POINTER, "weight bias"))


@mirrors("Linear")
class CLinear(ctypes.Structure):
    _fields_ = fields(
        (POINTER, "weight bias"),
        (LONG, "outputs inputs"),
        (POINTER, "scales"),
        (LONG, "group"),
        (INT, "bits asymmetric activation_bits"),
    )


@mirrors("Rows")
class CRows(ctypes.Structure):
    _fields_ = fields(
        (INT, "batch tokens"), (POINTER, "positions first visible key_positions"), (LONG, "visible_stride alike shared")
    )


@mirrors("Heads")
class CHeads(ctypes.Structure):
    _fields_ = fields((INT, "query kv dim padded_dim"))


@mirrors("Cache")
class CCache(ctypes.Structure):
    _fields_ = fields((POINTER, "keys values"), (LONG, "capacity past"), (POINTER, "key_scales value_scales"))


@mirrors("Rotary")
class CRotary(ctypes.Structure):
    _fields_ = fields((POINTER, "cosine sine"), (INT, "dim interleaved"), (LONG, "table"))


@mirrors("QkvWeights")
class CQkvWeights(ctypes.Structure):
    _fields_ = fields(
        (CNorm, "norm"), (CLinear, "proj"), (POINTER, "q_norm k_norm"), (c_float, "qk_eps"), (INT, "table whole_norms")
    )


@mirrors("AttentionParams")
class CAttentionParams(ctypes.Structure):
    _fields_ = fields(
        (c_float, "scale"), (INT, "window causal"), (POINTER, "slopes"), (c_float, "cap"), (POINTER, "sinks")
    )


@mirrors("MlpWeights")
class CMlpWeights(ctypes.Structure):
    _fields_ = fields((CNorm, "norm"), (CLinear, "up"), (INT, "activation gated"), (CNorm, "addend_norm"))


@mirrors("DenseMlp")
class CDenseMlp(ctypes.Structure):
    _fields_ = fields((CMlpWeights, "region"), (CLinear, "out"), (CNorm, "out_norm"))


@mirrors("ExpertMlps")
class CExpertMlps(ctypes.Structure):
    _fields_ = fields((POINTER, "regions outs"), (LONG, "count"))


@mirrors("Router")
class CRouter(ctypes.Structure):
    _fields_ = fields(
        (CLinear, "matrix"),
        (POINTER, "choice_bias"),
        (LONG, "chosen"),
        (INT, "renormalised sigmoid"),
        (c_float, "factor"),
    )


@mirrors("Mixture")
class CMixture(ctypes.Structure):
    _fields_ = fields((CRouter, "router"), (CExpertMlps, "experts"), (LONG, "first"), (CLinear, "shared_gate"))


@mirrors("Layer")
class CLayer(ctypes.Structure):
    _fields_ = fields(
        (CQkvWeights, "qkv"),
        (CAttentionParams, "attention"),
        (CLinear, "attn_out"),
        (CDenseMlp, "mlp"),
        (POINTER, "mixture"),
    )
