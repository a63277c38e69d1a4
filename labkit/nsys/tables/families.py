"""The kind of work of PyTorch's operators and of known libraries' kernels, by their names."""

from __future__ import annotations

import re
from functools import lru_cache

from labkit.nsys.tables.kernel_names import brief

ATTENTION, CONVOLUTION, MATMUL = "attention", "convolution", "matrix multiplication"
COMMUNICATION, NORMALISATION, SOFTMAX = "communication", "normalisation", "softmax"
INDEXING, COPY, REDUCTION = "embedding, indexing", "copy, fill", "reduction"
WAITING, ELEMENTWISE, OTHER = "waiting for the device", "elementwise", "other"
FAMILIES = (
    *(COMMUNICATION, ATTENTION, CONVOLUTION, MATMUL, NORMALISATION),
    *(SOFTMAX, INDEXING, COPY, REDUCTION, ELEMENTWISE, WAITING),
)
VIEWS = (  # operators that only view a tensor differently, without work
    "view|reshape|expand|transpose|permute|t|slice|detach|alias|as_strided|squeeze|unsqueeze|narrow|split|chunk|unbind|"
    "unfold|diagonal|flatten|unflatten|movedim|swapaxes|lift_fresh|size|stride|result_type|set|resize|broadcast_to"
)
OPERATORS = (  # the first pattern found in the name counts
    (COMMUNICATION, r"c10d|nccl|all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|record_param_comms"),
    (WAITING, r"::(?:item|_?local_scalar_dense|is_nonzero|synchronize)\b"),
    (ATTENTION, r"attention|attn|fmha|sdpa"),
    (CONVOLUTION, r"conv(?!ert)"),
    (MATMUL, r"\b_?(?:scaled_|grouped_)?(?:mm|addmm|bmm|baddbmm|mv|addmv)\b|linear(?!\dd)|matmul|gemm|einsum|Mm"),
    (NORMALISATION, r"norm(?!al)|normalize"),
    (SOFTMAX, r"softmax"),
    (OTHER, rf"aten::_?(?:{VIEWS})(?:_alias|_with_sizes|_)?\b"),
    (INDEXING, r"embedding|index|gather|scatter|select|take|sort|topk|nonzero|unique"),
    (COPY, r"copy|clone|contiguous|::cat|stack|::to\b|fill|full|zero|ones|empty|arange|pad"),
    (REDUCTION, r"sum|mean|(?<!clamp_)(?:max|min)\b|arg|prod\b|any|all\b|var\b|std\b"),
    (ELEMENTWISE, r"aten::\w+"),
)
# Kernels of cuBLAS, cuDNN, CUTLASS, rocBLAS, MIOpen, NCCL, FlashAttention, Triton, PyTorch, vLLM and TensorRT-LLM.
KERNELS = tuple(
    (family, re.compile(pattern, re.IGNORECASE))
    for family, pattern in (
        (
            COMMUNICATION,
            r"nccl|rccl|nvshmem|cross_device_reduce|multimem|all_?reduce|all_?gather|reduce_?scatter|all_?to_?all",
        ),
        (ATTENTION, r"flash_?(?:fwd|bwd|attn|infer|mla)|fmha|attention|attn|paged_?kv|decode_split|efficient_att"),
        (INDEXING, r"embedding"),
        (CONVOLUTION, r"scudnn|conv(?!ert)|wgrad|dgrad|winograd|im2col|col2im|fprop|nchwtonhwc|nhwctonchw"),
        (
            MATMUL,
            r"gemm|gemv|gevv|nvjet|cijk|xmma|cutlass|cublas|splitk|\bs\d{4,5}|[_-]mm_|matmul|bmm_|dot_kernel|marlin|"
            r"group(?:ed)?_?mm|fused_moe_kernel|_wvsplit",
        ),
        (NORMALISATION, r"norm|\bbn_[fb]w|gammabeta"),
        (SOFTMAX, r"softmax"),
        (INDEXING, r"index|indices|gather|scatter|sort|topk|radix|scan|unique|select|histogram|reshape_and_cache"),
        (COPY, r"copy|memcpy|memset|fill|transpose|catarray|pad_?|permute"),
        (REDUCTION, r"reduce|reduction|triton_red|triton_per|argmax|argmin|cumsum"),
        (
            ELEMENTWISE,
            r"elementwise|triton_poi|vectorized|act_and_mul|silu|gelu|relu|rotary|dropout|distribution|multi_tensor|"
            r"functor|_add_|_mul_|cast|quant|tensorop|subtensorop",
        ),
    )
)


@lru_cache(maxsize=100_000)
def operator_family(name: str) -> str:
    """The family of an operator of PyTorch, or of a range that is named like one: one of FAMILIES or OTHER."""
    return next((family for family, pattern in OPERATORS if re.search(pattern, name)), OTHER)


@lru_cache(maxsize=100_000)
def kernel_family(name: str) -> str:
    """The family of a kernel: one of FAMILIES, or OTHER if its name does not tell."""
    return next((family for family, pattern in KERNELS if pattern.search(brief(name))), OTHER)
