"""Operators of PyTorch have the family of what they do. What PyTorch knows about them itself is the measure."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.utils.flop_counter import flop_registry

from labkit.nsys.tables.families import (
    ATTENTION,
    CONVOLUTION,
    COPY,
    ELEMENTWISE,
    IN_PLACE,
    INDEXING,
    MATMUL,
    OTHER,
    REDUCTION,
    WAITING,
    operator_family,
)
from labkit.nsys.tables.pointwise import EACH, SAME, UNTAGGED

COPY_IF_NEEDED = {  # they return their input, or a copy of it
    "_autocast_to_full_precision", "_autocast_to_reduced_precision", "coalesce", "contiguous", "cpu", "cuda", "to",
    "as_tensor", "pin_memory",
}  # fmt: skip
SCHEMAS = [schema for schema in torch._C._jit_get_all_schemas() if schema.name.startswith("aten::")]
NAMES = {schema.name for schema in SCHEMAS}


def overload(name: str) -> torch._ops.OpOverload:
    packet, _, variant = name.removeprefix("aten::").partition(".")
    return getattr(getattr(torch.ops.aten, packet), variant or "default")


TAGS = {
    name[6:].partition(".")[0]
    for name in torch._C._dispatch_get_all_op_names()
    if name.startswith("aten::") and torch.Tag.pointwise in overload(name).tags
}


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


def test_elementwise_is_what_pytorch_tags_as_pointwise() -> None:
    """Operators with another family besides the tag, and pointwise ones without the tag, are listed."""
    other_families = {"clone": COPY, "masked_fill": COPY, "equal": WAITING, "positive": OTHER}
    of_one_overload = {"max": REDUCTION, "min": REDUCTION}
    assert len(TAGS) > 200
    differing = {name: family for name in TAGS if (family := operator_family(f"aten::{name}")) != ELEMENTWISE}
    plain = {IN_PLACE.sub("", name): family for name, family in differing.items()}
    assert plain == other_families | of_one_overload

    elementwise = {name[6:] for name in NAMES if operator_family(name) == ELEMENTWISE}
    assert elementwise > TAGS - differing.keys()
    untagged = {IN_PLACE.sub("", name).removeprefix(EACH) for name in elementwise - TAGS}
    assert untagged <= TAGS | SAME.keys() | set(UNTAGGED.split())
    assert set(SAME.values()) <= TAGS


@pytest.mark.parametrize("name", sorted(SAME))
def test_an_operator_without_the_tag_calls_the_tagged_one(name: str) -> None:
    """Both have the same arguments, so one is another name of the other."""
    arguments = {
        plain: {
            tuple(str(value.type) for value in schema.arguments)
            for schema in SCHEMAS
            if schema.name == f"aten::{plain}" and any(str(value.type) == "Tensor" for value in schema.arguments)
        }
        for plain in (name, SAME[name])
    }
    assert arguments[name] & arguments[SAME[name]]


def test_operators_that_pytorch_does_not_group_have_the_family_of_what_they_do() -> None:
    expected = {
        MATMUL: "dot vdot outer inner _int_mm _weight_int8pack_mm",
        WAITING: "equal allclose",
        REDUCTION: "count_nonzero median nanmedian mode quantile max amin max_pool2d adaptive_avg_pool2d",
        OTHER: (
            "_unsafe_view unsafe_split unsafe_chunk meshgrid upsample_bilinear2d __upsample_bilinear lstm gru_cell "
            "linalg_svd cholesky _fft_c2c cdist max_unpool2d grid_sampler an_operator_of_tomorrow"
        ),
        INDEXING: "index_select masked_select select_backward nonzero histc bincount",
        ELEMENTWISE: "copysign fmax maximum dropout multiply _foreach_add hardswish_",
        COPY: "cat concat view_copy flip tril randn uniform_",
    }
    for family, names in expected.items():
        assert {name: operator_family(f"aten::{name}") for name in names.split()} == dict.fromkeys(
            names.split(), family
        )
