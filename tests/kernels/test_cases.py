"""A case counts the bytes of all tensors in an unfused call of its op."""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import pytest
import torch
from helpers.kernels.ops import WEIGHTS, Draw, rows_of
from helpers.sweeps import paired
from torch import Tensor

from labkit.kernels.attention.cases import CASES as ATTENTION_CASES
from labkit.kernels.attention.cases import AttentionCase, seen_pairs
from labkit.kernels.decode_step import STAGES_PER_LAYER
from labkit.kernels.decode_step.cases import StepCase
from labkit.kernels.gemm.cases import SMALL as GEMM_CASES
from labkit.kernels.gemm.cases import GemmCase
from labkit.kernels.int8_cache import quantised
from labkit.kernels.layer_ops import Pass, layer_cases
from labkit.kernels.mlp_gemm.cases import SMALL as MLP_CASES
from labkit.kernels.mlp_gemm.cases import MlpCase
from labkit.kernels.qkv_gemm.cases import SMALL as QKV_CASES
from labkit.kernels.qkv_gemm.cases import QkvCase
from labkit.kernels.shapes import ODD, LayerShape, ModelShape, OpCase, Sizes

each_type = pytest.mark.parametrize("dtype", WEIGHTS.values(), ids=WEIGHTS)
each_shape = pytest.mark.parametrize("shape", ODD, ids=lambda shape: shape.model)


def nbytes(*records: Any) -> int:
    """Bytes of all tensors of records."""
    return sum(tensor.numel() * tensor.itemsize for record in records for tensor in tensors(record))


def tensors(record: Any) -> Iterator[Tensor]:
    if isinstance(record, Tensor):
        yield record
    elif is_dataclass(record):
        yield from (tensor for field in fields(record) for tensor in tensors(getattr(record, field.name)))


@each_type
@pytest.mark.parametrize("case", QKV_CASES, ids=lambda case: case.name)
def test_qkv_counts_its_matrix_and_its_norm(case: QkvCase, dtype: torch.dtype) -> None:
    draw, shape = Draw(dtype), case.shape
    plain, _ = draw.linear(case.outputs, shape.hidden, bias="qkv" in shape.biases)
    assert case.bytes(3, Sizes.of(dtype)) == nbytes(draw.norm(shape.norm, shape.hidden), plain)


@each_type
@pytest.mark.parametrize("case", MLP_CASES, ids=lambda case: case.name)
def test_mlp_counts_its_matrix_its_norm_and_the_bias_before_it(case: MlpCase, dtype: torch.dtype) -> None:
    draw, shape = Draw(dtype), case.shape
    plain, _ = draw.linear(shape.intermediate, shape.hidden, bias="ff1" in shape.biases, gated=shape.gated)
    bias = draw.normal(shape.hidden if "attn_out" in shape.biases and not shape.parallel else 0)
    assert case.bytes(3, Sizes.of(dtype)) == nbytes(draw.norm(shape.norm, shape.hidden), plain, bias)


@each_type
@pytest.mark.parametrize("case", GEMM_CASES, ids=lambda case: case.name)
def test_a_product_counts_its_matrix(case: GemmCase, dtype: torch.dtype) -> None:
    plain, _ = Draw(dtype).linear(case.outputs, case.inputs, bias=case.bias)
    assert case.bytes(3, Sizes.of(dtype)) == nbytes(plain)
    assert case.flops(3) == 2 * 3 * plain.weight.numel()


@pytest.mark.parametrize(
    ("case", "dtype"), paired({case.name: case for case in ATTENTION_CASES if case.tokens == 1}, WEIGHTS)
)
def test_attention_counts_the_slots_that_a_new_token_sees(case: AttentionCase, dtype: torch.dtype) -> None:
    draw, heads = Draw(dtype), case.shape.heads
    visible_slots = min(case.past + 1, case.window or case.past + 1)
    cache, _ = draw.cache(heads, rows_of(2, 1, case.past), case.past, case.past + 1)
    slots = [part[:, :, :visible_slots, : heads.dim] for part in (cache.keys, cache.values)]
    assert case.bytes(2, Sizes.of(dtype)) == nbytes(*slots)
    in_int8 = [tensor for part in slots for tensor in quantised(part)]
    assert case.bytes(2, Sizes.of(dtype, kv_dtype=torch.int8)) == nbytes(*in_int8)
    assert case.flops(2) == 2 * 2 * 2 * heads.query * heads.dim * visible_slots


@pytest.mark.parametrize("window", [None, 1, 4, 9, 50])
def test_pairs_are_those_of_the_mask(window: int | None) -> None:
    distance = torch.arange(9)[:, None] - torch.arange(9)
    visible = (distance >= 0) & (distance < (window or 9))
    assert seen_pairs(9, window) == int(visible.sum())
    shape = ODD[0]
    per_pair = 4 * shape.heads.query * shape.heads.dim
    assert AttentionCase(shape, 5, 4, window).flops(1) == per_pair * int(visible[5:].sum())


@each_shape
def test_steps_come_to_as_many_flops_as_the_pass_over_all_their_tokens(shape: LayerShape) -> None:
    """Except for the head of all tokens before the last one."""
    model = ModelShape(shape, (None, 3), shape.hidden, learned_positions=True, embedding_norm=True, final_norm=True)
    steps = sum(StepCase(model, past).flops(2) for past in range(7))
    assert StepCase(model, 0, 7).flops(2) == steps - 6 * 2 * 2 * shape.vocabulary * shape.hidden


@each_shape
def test_a_layer_has_an_op_for_every_stage_and_counts_each_bias_once(shape: LayerShape) -> None:
    cases: dict[str, OpCase] = layer_cases(shape, Pass(0))
    assert tuple(cases) == STAGES_PER_LAYER == ("qkv", "attention", "attn_out", "mlp", "mlp_out", "residual")
    vectors = Sizes(matrix=0, vector=1, cache=0, scale=0)
    heads, inner = shape.heads, shape.intermediate * (2 if shape.gated else 1)
    lengths = {"qkv": (heads.query + 2 * heads.kv) * heads.dim, "attn_out": shape.hidden, "ff1": inner}
    lengths["ff2"] = shape.hidden
    norms = shape.norm_numbers * (1 if shape.shared_norm else 2)
    expected = norms + sum(length for name, length in lengths.items() if name in shape.biases)
    assert sum(case.bytes(1, vectors) for case in cases.values()) == expected
