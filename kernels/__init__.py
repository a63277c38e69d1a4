"""The ops of the fused layer, one folder each: public function, reference, C++ and Triton implementations.

`impl` names the implementation. "reference" is the unfused sequence of torch ops, and the oracle of the tests. "cpp" is
the fused C++ kernel, compiled for this machine on first use (`build`). "triton" is the fused GPU kernel.
"""

from . import build
from .attention import attention
from .decode_step import DecodeStep, EmbeddingWeights, HeadWeights, LayerWeights, ModelWeights
from .gemm import gemm
from .mailbox import Message, Ring
from .mlp_gemm import mlp_gemm
from .qkv_gemm import qkv_gemm
from .residual_add import residual_add

__all__ = [
    "DecodeStep",
    "EmbeddingWeights",
    "HeadWeights",
    "LayerWeights",
    "Message",
    "ModelWeights",
    "Ring",
    "attention",
    "build",
    "gemm",
    "mlp_gemm",
    "qkv_gemm",
    "residual_add",
]
