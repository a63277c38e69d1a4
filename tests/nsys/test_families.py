"""Operators of PyTorch have the family of what they do. What PyTorch knows about them itself is the measure."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.utils.flop_counter import flop_registry

from labkit.nsys.tables.families import (
    ATTENTION,
    CONVOLUTION,
    COPY,
    ELEMENTWISE,
    INDEXING,
    MATMUL,
    OTHER,
    REDUCTION,
    WAITING,
    operator_family,
)

COPY_IF_NEEDED = {  # they return their input, or a copy of it
    "_autocast_to_full_precision", "_autocast_to_reduced_precision", "coalesce", "contiguous", "cpu", "cuda", "to",
    "as_tensor", "pin_memory",
}  # fmt: skip
SCHEMAS = [schema for schema in torch._C._jit_get_all_schemas() if schema.name.startswith("aten::")]
NAMES = {schema.name for schema in SCHEMAS}


def views() -> Iterator[str]:
    """The operators with a result that shares an input's memory, and without a write."""
    for schema in SCHEMAS:
        inputs = [value.alias_info for value in schema.arguments if str(value.type) == "Tensor" and value.alias_info]
        results = [value.alias_info for value in schema.returns if value.alias_info]
        if inputs and results and not schema.is_mutable:
            yield schema.name


def test_every_view_of_pytorch_is_without_work() -> None:
    names = {name for name in views() if name.removeprefix("aten::") not in COPY_IF_NEEDED}
    assert len(names) > 60
    assert {name: family for name in sorted(names) if (family := operator_family(name)) != OTHER} == {}
    for name in COPY_IF_NEEDED:
        assert operator_family(f"aten::{name}") == COPY


def test_copies_of_views_are_copies() -> None:
    copies = {f"{name}_copy" for name in views()} & NAMES
    assert len(copies) > 20
    assert {name for name in copies if operator_family(name) not in (COPY, INDEXING)} == set()


def test_operators_in_place_have_the_family_of_the_operator_without() -> None:
    pairs = {name: name.removesuffix("_") for name in NAMES if name.endswith("_") and name.removesuffix("_") in NAMES}
    pairs |= {f"{name}_out": name for name in NAMES if not name.endswith("_")}
    assert len(pairs) > 1_500
    assert {name for name, plain in pairs.items() if operator_family(name) != operator_family(plain)} == set()


def test_operators_whose_flops_pytorch_counts_are_products_convolutions_or_attention() -> None:
    names = {f"aten::{packet.__name__}" for packet in flop_registry if str(packet).startswith("aten.")}
    assert {name for name in names if operator_family(name) not in (MATMUL, CONVOLUTION, ATTENTION)} == set()
    products = {name for name in NAMES if {"mm", "addmm", "bmm", "baddbmm", "addbmm", "mv"} & set(name[6:].split("_"))}
    assert {name for name in products if operator_family(name) != MATMUL} == set()


def test_operators_that_pytorch_does_not_group_have_the_family_of_what_they_do() -> None:
    expected = {
        MATMUL: "dot vdot outer inner _int_mm _weight_int8pack_mm",
        WAITING: "equal allclose",
        REDUCTION: "count_nonzero median nanmedian mode quantile max amin",
        OTHER: "_unsafe_view unsafe_split unsafe_chunk meshgrid",
        INDEXING: "index_select masked_select select_backward nonzero",
        ELEMENTWISE: "upsample_bilinear2d __upsample_bilinear copysign fmax maximum",
        COPY: "cat concat view_copy",
    }
    for family, names in expected.items():
        assert {name: operator_family(f"aten::{name}") for name in names.split()} == dict.fromkeys(
            names.split(), family
        )
