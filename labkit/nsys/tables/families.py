"""The kind of work of PyTorch's operators and of known libraries' kernels, by their names."""

from __future__ import annotations

import re
from functools import lru_cache

from labkit.nsys.analysis.communication import COMMUNICATES
from labkit.nsys.tables.kernel_names import brief
from labkit.nsys.tables.pointwise import is_pointwise

ATTENTION, CONVOLUTION, MATMUL = "attention", "convolution", "matrix multiplication"
COMMUNICATION, NORMALISATION, SOFTMAX = "communication", "normalisation", "softmax"
INDEXING, COPY, REDUCTION = "embedding, indexing", "copy, fill", "reduction"
WAITING, ELEMENTWISE, OTHER = "waiting for the device", "elementwise", "other"
FAMILIES = (
    *(COMMUNICATION, ATTENTION, CONVOLUTION, MATMUL, NORMALISATION),
    *(SOFTMAX, INDEXING, COPY, REDUCTION, ELEMENTWISE, WAITING),
)
VIEWS = (  # operators that only view or describe a tensor differently, without work
    "(?:_?(?:sparse_|unsafe_|mkldnn_)?(?:view|reshape|expand|transpose|broadcast_to|split|chunk))(?:_as|_alias|_with_sizes)?|"
    "(?:matrix_|numpy_)?[mtTH]|m[TH]|adjoint|moveaxis|movedim|permute|swapaxes|swapdims|slice|slice_inverse|select|narrow|"
    "squeeze|unsqueeze|_ncf_unsqueeze|flatten|unflatten|ravel|unfold|unbind|(?:linalg_)?diagonal|[dhv]split|tensor_split|"
    "atleast_[123]d|broadcast_tensors|meshgrid|as_strided|alias|detach|data|lift|lift_fresh|set|set_data|resize|resize_as|"
    "view_as_(?:real|complex)|_?conj|_neg_view|_ncf_view|real|imag|resolve_(?:conj|neg)|positive|"
    r"_?(?:values|indices)|(?:crow|ccol|col|row)_indices|_nested_(?:get|view_from)_(?!\w*copy)\w+|_fw_primal|_make_dual|"
    r"_unpack_dual|_grad_sum_to_size|_test\w*_view|_has_same_storage_numel|is_\w+|(?:sym_)?(?:size|stride|storage_offset)|"
    r"(?:sym_)?numel|(?:dense_|sparse_)?dim|element_size|get_device|record_stream|requires_grad|result_type"
)
PRODUCT = r"(?:^|_|\b)(?:mm|addmm|bmm|addbmm|baddbmm|mv|addmv|smm|hspmm|sspaddmm|spmm)(?=_|\b)"
# Operators that are not pointwise: the first pattern found in the name without a last "_" or "_out" counts.
OPERATORS = (
    (COMMUNICATION, r"c10d|nccl|all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|record_param_comms"),
    (WAITING, r"::(?:item|_?local_scalar_dense|is_nonzero|equal|allclose|synchronize)\b"),
    (ATTENTION, r"attention|attn|fmha|sdpa"),
    (CONVOLUTION, r"conv(?!ert)"),
    (OTHER, r"upsample|interpolate|unpool"),
    (
        MATMUL,
        rf"{PRODUCT}|linear(?!\dd|_combination)|matmul|gemm|einsum|Mm|mmBackward|tensordot|multi_dot|vecdot|matrix_power|"
        r"::(?:v?dot|outer|ger|addr|inner|kron)\b",
    ),
    (NORMALISATION, r"norm(?!al)|normalize"),
    (SOFTMAX, r"softmax"),
    (OTHER, rf"aten::(?:{VIEWS})$"),
    (REDUCTION, r"count_nonzero|median|quantile|kthvalue|::(?:mode|trace)\b|_is_(?:all|any)_true"),
    (
        INDEXING,
        r"embedding|index|gather|scatter|select|take|argwhere|sort|topk|nonzero|unique|histogram|histc|bincount",
    ),
    (
        COPY,
        r"copy|clone|contiguous|::(?:con)?cat|stack|::(?:to|cpu|cuda|as_tensor|type_as|coalesce|repeat|tile|roll)\b|"
        r"pin_memory|_autocast_to|_cast_|fill|full|zero|ones|empty|arange|pad|flip|shuffle|repeat_interleave|"
        r"::(?:rand\w*|tri[lu]|linspace|logspace|eye|uniform|bernoulli|exponential|(?:log_)?normal)$",
    ),
    (REDUCTION, r"sum|mean|(?<!clamp_)(?:max|min)\b|arg|prod\b|any|all\b|var\b|std\b|pool\d"),
)
ATEN = "aten::"
IN_PLACE = re.compile(r"(?<=[^_])(?:_out|_)$")  # ends of operators that write into a given tensor
# Kernels of cuBLAS, cuDNN, CUTLASS, rocBLAS, MIOpen, NCCL, FlashAttention, Triton, PyTorch, vLLM and TensorRT-LLM.
KERNELS = tuple(
    (family, re.compile(pattern, re.IGNORECASE))
    for family, pattern in (
        (COMMUNICATION, COMMUNICATES.pattern),
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
    """The family of an operator of PyTorch, or of a range that is named like one: one of FAMILIES, or OTHER if the name
    does not tell.
    """
    bare = IN_PLACE.sub("", name)
    if bare.startswith(ATEN) and is_pointwise(bare.removeprefix(ATEN)):
        return ELEMENTWISE
    return next((family for family, pattern in OPERATORS if re.search(pattern, bare)), OTHER)


@lru_cache(maxsize=100_000)
def kernel_family(name: str) -> str:
    """The family of a kernel: one of FAMILIES, or OTHER if its name does not tell."""
    return next((family for family, pattern in KERNELS if pattern.search(brief(name))), OTHER)
