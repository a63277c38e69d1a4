"""Operators of PyTorch: work from their shapes, compared with PyTorch's own counter, and the time of each operator."""

from __future__ import annotations

import json
from dataclasses import replace

import pandas as pd
import pytest
import torch
from helpers.traces.handmade import Recorder
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from labkit.nsys.tables.families import kernel_family, operator_family
from labkit.nsys.tables.gaps import short_kernels
from labkit.nsys.tables.operator_work import operator_work
from labkit.nsys.tables.operators import NO_OPERATOR, categories, operators
from labkit.nsys.tables.peaks import Peak, peak_of
from labkit.nsys.trace import Trace, TraceError, typed


def inputs_json(*tensors: torch.Tensor, values: tuple[str, ...] = ()) -> str:
    """Inputs of an operator as a trace has them: tensors, followed by other values."""
    names = {torch.float32: "float", torch.bfloat16: "c10::BFloat16", torch.int64: "long int"}
    rest = len(values)
    return json.dumps(
        {
            "dims": [list(tensor.shape) for tensor in tensors] + [[]] * rest,
            "types": [names[tensor.dtype] for tensor in tensors] + ["Scalar"] * rest,
            "strides": [list(tensor.stride()) for tensor in tensors] + [[]] * rest,
            "values": [""] * len(tensors) + list(values),
        }
    )


def counted(run: object, *tensors: torch.Tensor, **options: object) -> int:
    with FlopCounterMode(display=False) as counter:
        run(*tensors, **options)  # type: ignore[operator]
    return counter.get_total_flops()


def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    with sdpa_kernel(SDPBackend.MATH):  # computes products, which the counter sees
        return torch.nn.functional.scaled_dot_product_attention(query, key, value)


A, B = torch.ones(3, 40, 50), torch.ones(3, 50, 60)
IMAGE, KERNEL = torch.ones(2, 6, 33, 17), torch.ones(8, 3, 3, 5)


@pytest.mark.parametrize(
    ("name", "run", "tensors", "values", "options"),
    [
        ("mm", torch.mm, (A[0], B[0]), (), {}),
        ("bmm", torch.bmm, (A, B), (), {}),
        ("linear", torch.nn.functional.linear, (A, torch.ones(60, 50)), (), {}),
        ("conv2d", torch.nn.functional.conv2d, (IMAGE, KERNEL, torch.ones(8)), ("[2, 1]", "[1, 2]", "[1, 1]", "2"),
         {"stride": (2, 1), "padding": (1, 2), "groups": 2}),
        ("scaled_dot_product_attention", attention, (torch.ones(2, 3, 7, 8),) * 3, (), {}),
    ],
)  # fmt: skip
def test_flops_are_those_that_pytorch_counts(
    name: str, run: object, tensors: tuple[torch.Tensor, ...], values: tuple[str, ...], options: dict[str, object]
) -> None:
    work = operator_work(f"aten::{name}", inputs_json(*tensors, values=values))
    assert work is not None
    assert work.flops == counted(run, *tensors, **options)


def test_a_causal_mask_leaves_half_of_the_pairs() -> None:
    query = torch.ones(2, 3, 7, 8)
    for name, values in (
        ("_scaled_dot_product_flash_attention", ("0.", "True")),
        ("scaled_dot_product_attention", ("", "0.", "True")),
    ):
        work = operator_work(f"aten::{name}", inputs_json(query, query, query, values=values))
        assert work is not None
        assert work.flops == 2 * 2 * 3 * (7 * 8 // 2) * 16
    heads_last = torch.ones(2, 7, 3, 8)
    forward = inputs_json(heads_last, heads_last, heads_last, values=("", "", "7", "7", "0.", "False"))
    plain = operator_work("aten::_flash_attention_forward", forward)
    assert plain is not None
    assert plain.flops == 2 * 2 * 3 * 7 * 7 * 16


def test_bytes_count_every_operand_once() -> None:
    a, b = torch.ones(8, 16, dtype=torch.bfloat16), torch.ones(16, 32, dtype=torch.bfloat16)
    work = operator_work("aten::mm", inputs_json(a, b))
    assert work is not None
    assert work.bytes == 2 * (8 * 16 + 16 * 32 + 8 * 32)
    expanded = torch.ones(1, 64).expand(1000, 64)
    work = operator_work("aten::mul", inputs_json(torch.ones(1000, 64), expanded))
    assert work is not None
    assert work.bytes == 4 * (64_000 + 64 + 64_000)
    work = operator_work("aten::copy_", inputs_json(torch.ones(10), torch.ones(10, dtype=torch.bfloat16)))
    assert work is not None
    assert work.bytes == 60
    work = operator_work("aten::embedding", inputs_json(torch.ones(1000, 8), torch.ones(2, 5, dtype=torch.int64)))
    assert work is not None
    assert work.bytes == 2 * 10 * 8 * 4 + 80


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("aten::mm", ""),
        ("aten::mm", '{"dims": [[], []], "types": ["", ""]}'),
        ("aten::mm", '{"dims": "no list"}'),
        ("aten::cat", '{"dims": [[[2, 3], [4, 3]], []], "types": ["TensorList", "Scalar"]}'),
        ("custom::op", '{"dims": [[3]], "types": ["float"]}'),
        ("aten::conv2d", '{"dims": [[1, 3, 8, 8], [8, 3, 3, 3]], "types": ["float", "float"]}'),
    ],
)
def test_what_shapes_do_not_tell_is_not_counted(name: str, text: str) -> None:
    assert operator_work(name, text) is None


def recorded(with_shapes: bool = True) -> Trace:
    """Two products within a wrapper, one of them with two kernels that overlap, and a kernel without an operator."""
    recorder = Recorder()
    recorder.operator("aten::linear", 0, 60)
    for start in (1, 31):
        recorder.operator("aten::mm", start, start + 20)
    recorder.kernel(2, 10, 30, name="gemm")
    recorder.kernel(3, 20, 40, name="split_k", stream=8)
    recorder.kernel(32, 50, 80, name="gemm")
    recorder.kernel(70, 90, 95, name="free")
    trace = recorder.trace()
    shapes = inputs_json(torch.ones(1000, 1000), torch.ones(1000, 1000))
    inputs = [shapes if with_shapes and name == "aten::mm" else "" for name in trace.calls["name"]]
    devices = typed("devices", {"process": [0], "device": [0], "name": pd.Categorical(["NVIDIA H100 80GB HBM3"])})
    return replace(trace, calls=trace.calls.assign(inputs=pd.Categorical(inputs)), devices=devices)


def test_time_belongs_to_the_innermost_operator_once() -> None:
    product, free = operators(recorded()).to_dict("records")
    assert (product["name"], product["shapes"], product["dtype"]) == ("aten::mm", "1000x1000, 1000x1000", "float")
    assert (product["count"], product["kernels"], product["total_ns"], product["median_ns"]) == (2, 1.5, 60_000, 30_000)
    assert product["tflop_s"] == pytest.approx(2 * 2e9 / 60e-6 / 1e12)
    assert product["tb_s"] == pytest.approx(2 * 12e6 / 60e-6 / 1e12)
    assert product["bound"] == "compute"
    assert product["roofline_share"] == pytest.approx(2 * 2e9 / 66.9e12 / 60e-6)
    assert (free["name"], free["category"], free["total_ns"]) == (NO_OPERATOR, "no operator", 5_000)
    assert categories(operators(recorded()))["share"].sum() == pytest.approx(1)


def test_without_shapes_or_peaks_nothing_is_made_up() -> None:
    row = operators(recorded(with_shapes=False)).iloc[0]
    assert row[["flops", "bytes", "tflop_s", "roofline_share"]].isna().all()
    trace = replace(recorded(), devices=typed("devices", {}))
    assert operators(trace)["roofline_share"].isna().all()
    with_peak = operators(trace, peak=Peak(0, 0, 0, 100, 0, 1.0))
    assert with_peak["roofline_share"].iloc[0] == pytest.approx(2 * 20e-6 / 60e-6, rel=0.3)
    with pytest.raises(TraceError, match="got a trace without operators of PyTorch"):
        operators(Recorder().trace())
    on_the_cpu = Recorder()
    on_the_cpu.operator("aten::mm", 0, 10)
    with pytest.raises(TraceError, match="got a trace without GPU operations"):
        operators(on_the_cpu.trace())


def test_an_operator_that_the_profiler_names_counts_where_the_launch_was_not_recorded() -> None:
    trace = recorded()
    rows = trace.operations.assign(correlation=0, external=[9, 9, 9, 0])
    calls = trace.calls.assign(external=[9 if name == "aten::linear" else 0 for name in trace.calls["name"]])
    table = operators(replace(trace, operations=rows, calls=calls))
    assert table["name"].tolist() == ["aten::linear", NO_OPERATOR]


def test_short_kernels_are_ranked_by_the_idle_time_before_them() -> None:
    recorder = Recorder()
    for index in range(10):
        recorder.kernel(20 * index, 20 * index + 5, 20 * index + 7, name="short")
        recorder.kernel(20 * index + 1, 20 * index + 8, 20 * index + 10, name="other")
    recorder.kernel(300, 310, 400, name="long")
    table = short_kernels(recorder.trace())
    assert table["name"].tolist() == ["short", "other"]
    assert table["idle_ns"].tolist() == [9 * 15_000, 10 * 1_000]
    assert table["count"].tolist() == [10, 10]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("aten::addmm", "matrix multiplication"), ("aten::_flash_attention_forward", "attention"),
        ("aten::cudnn_convolution", "convolution"), ("aten::native_layer_norm", "normalisation"),
        ("aten::_softmax", "softmax"), ("aten::mul_", "elementwise"), ("aten::copy_", "copy, fill"),
        ("aten::mean", "reduction"), ("aten::embedding", "embedding, indexing"), ("vllm::moe_forward", "other"),
        ("c10d::allreduce_", "communication"),
        ("aten::is_nonzero", "waiting for the device"), ("aten::item", "waiting for the device"),
        ("aten::_local_scalar_dense", "waiting for the device"), ("aten::nonzero", "embedding, indexing"),
        ("aten::normal_", "copy, fill"), ("aten::norm", "normalisation"), ("aten::clamp_max", "elementwise"),
        ("aten::max", "reduction"), ("aten::_convert_indices_from_coo_to_csr", "other"),
        ("aten::upsample_bilinear2d", "other"), ("aten::linear", "matrix multiplication"),
        ("aten::view", "other"), ("aten::t", "other"), ("aten::transpose_", "other"),
        ("aten::_reshape_alias", "other"), ("aten::view_copy", "copy, fill"),
        ("aten::tanh", "elementwise"), ("aten::sub", "elementwise"), ("aten::split_with_sizes", "other"),
    ],
)  # fmt: skip
def test_operators_have_the_category_of_what_they_do(name: str, kind: str) -> None:
    assert operator_family(name) == kind


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("void cutlass::Kernel2<cutlass_80_tensorop_s1688gemm_256x64_16x4_tn_align1>(T)", "matrix multiplication"),
        ("nvjet_tst_192x192_64x4_2x1_v_bz_coopB_bias_TNN", "matrix multiplication"),
        ("Cijk_Ailk_Bljk_HHS_BH_MT128x128x16", "matrix multiplication"),
        ("void flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 64>, false>(Params)", "attention"),
        ("ncclDevKernel_AllReduce_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "communication"),
        ("void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float>(int)", "normalisation"),
        ("void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda(T&)>(int)", "copy, fill"),
        ("void at::native::elementwise_kernel<128, 2, at::native::CUDAFunctor_add<float>>(int)", "elementwise"),
        ("void split_embedding_codegen_forward_unweighted_kernel<float>(T)", "embedding, indexing"),
        ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, MeanOps>>(R)", "reduction"),
        ("void cudnn::bn_bw_1C11_kernel_new<float>(float)", "normalisation"),
        ("triton_poi_fused_add_0", "elementwise"), ("my_kernel", "other"),
    ],
)  # fmt: skip
def test_kernels_have_the_family_of_what_they_do(name: str, kind: str) -> None:
    assert kernel_family(name) == kind


def test_devices_are_known_by_their_names() -> None:
    h200, a100 = peak_of("NVIDIA H200"), peak_of("NVIDIA A100-SXM4-80GB")
    assert h200 is not None
    assert a100 is not None
    assert (h200.tb_s, a100.tflop_s(4, True), a100.tflop_s(4, False)) == (4.8, 156, 19.5)
    gh200 = peak_of("NVIDIA GH200 480GB")
    assert gh200 is not None
    assert gh200.tb_s == 4.0
    assert peak_of("Some Other GPU") is None
