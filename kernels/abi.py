"""The structs of `abi.h` in ctypes. The records of `types` make them on demand."""

import ctypes
from ctypes import c_float, c_int32, c_int64, c_void_p

from .build import mirrors


@mirrors("Norm")
class CNorm(ctypes.Structure):
    _fields_ = [("kind", c_int32), ("eps", c_float), ("weight", c_void_p), ("bias", c_void_p)]


@mirrors("Linear")
class CLinear(ctypes.Structure):
    _fields_ = [
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("outputs", c_int64),
        ("inputs", c_int64),
        ("scales", c_void_p),
        ("group", c_int64),
        ("bits", c_int32),
        ("asymmetric", c_int32),
        ("activation_bits", c_int32),
    ]


@mirrors("Rows")
class CRows(ctypes.Structure):
    _fields_ = [
        ("batch", c_int32),
        ("tokens", c_int32),
        ("positions", c_void_p),
        ("first", c_void_p),
        ("visible", c_void_p),
        ("key_positions", c_void_p),
        ("visible_stride", c_int64),
        ("alike", c_int64),
        ("shared", c_int64),
    ]


@mirrors("Heads")
class CHeads(ctypes.Structure):
    _fields_ = [("query", c_int32), ("kv", c_int32), ("dim", c_int32), ("padded_dim", c_int32)]


@mirrors("Cache")
class CCache(ctypes.Structure):
    _fields_ = [
        ("keys", c_void_p),
        ("values", c_void_p),
        ("capacity", c_int64),
        ("past", c_int64),
        ("key_scales", c_void_p),
        ("value_scales", c_void_p),
    ]


@mirrors("Rotary")
class CRotary(ctypes.Structure):
    _fields_ = [("cosine", c_void_p), ("sine", c_void_p), ("dim", c_int32), ("interleaved", c_int32)]


@mirrors("QkvWeights")
class CQkvWeights(ctypes.Structure):
    _fields_ = [("norm", CNorm), ("proj", CLinear), ("q_norm", c_void_p), ("k_norm", c_void_p), ("qk_eps", c_float)]


@mirrors("AttentionParams")
class CAttentionParams(ctypes.Structure):
    _fields_ = [
        ("scale", c_float),
        ("window", c_int32),
        ("causal", c_int32),
        ("slopes", c_void_p),
        ("cap", c_float),
    ]


@mirrors("MlpWeights")
class CMlpWeights(ctypes.Structure):
    _fields_ = [
        ("norm", CNorm),
        ("up", CLinear),
        ("activation", c_int32),
        ("gated", c_int32),
        ("addend_norm", CNorm),
    ]


@mirrors("DenseMlp")
class CDenseMlp(ctypes.Structure):
    _fields_ = [("region", CMlpWeights), ("out", CLinear), ("out_norm", CNorm)]


@mirrors("Layer")
class CLayer(ctypes.Structure):
    _fields_ = [
        ("qkv", CQkvWeights),
        ("attention", CAttentionParams),
        ("attn_out", CLinear),
        ("mlp", CDenseMlp),
    ]
