"""The ops of the fused layer, one folder each: public function, reference, C++ and Triton implementations.

`impl` names the implementation. "reference" is the unfused sequence of torch ops, and the oracle of the tests. "cpp" is
the fused C++ kernel, compiled for this machine on first use (`build`). "triton" is the fused GPU kernel.

This file imports every op: the key of a compiled library depends on the structs that the ops declare, and the library
gets the argument types of their functions when it is loaded. An op that is imported later would need another library.
"""

from . import build
from .attention import attention
from .choice.continuations import continue_beams
from .decode_step import DecodeStep, EmbeddingWeights, HeadWeights, LayerWeights, ModelWeights
from .experts import ExpertMlps, experts
from .gemm import gemm
from .linear_attention import conv_step, delta_step
from .mailbox import Message, Ring
from .mlp_gemm import mlp_gemm
from .norm_rows import norm_rows
from .qkv_gemm import qkv_gemm
from .residual_add import residual_add
from .route import Router, route
from .slot_copies import copy_slots

__all__ = [
    "DecodeStep",
    "EmbeddingWeights",
    "ExpertMlps",
    "HeadWeights",
    "LayerWeights",
    "Message",
    "ModelWeights",
    "Ring",
    "Router",
    "attention",
    "build",
    "continue_beams",
    "conv_step",
    "copy_slots",
    "delta_step",
    "experts",
    "gemm",
    "mlp_gemm",
    "norm_rows",
    "qkv_gemm",
    "residual_add",
    "route",
]
