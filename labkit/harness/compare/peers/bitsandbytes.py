"""bitsandbytes: linears of int8 or NF4 in the vanilla model, set up as transformers does when it loads a model."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from labkit.harness.compare.loaded_side import LoadedSide
from labkit.harness.compare.peers.in_memory import InMemory, stored
from labkit.harness.compare.vanilla_sides import impl_of
from labkit.harness.stored_weights import name_of
from labkit.system.errors import UserError
from labkit.weights.source import ModelSource

BITSANDBYTES_INT8 = "bitsandbytes-int8"
BITSANDBYTES_NF4 = "bitsandbytes-nf4"
OUTLIER = 6.0  # larger inputs are multiplied in the model's dtype: LLM.int8() with transformers' threshold
NF4_OUTPUTS, NF4_GROUP = 32, 64


class BitsAndBytes(InMemory):
    """Eager, with the LM head in the dtype of the other sides, as in transformers."""

    name = "bitsandbytes"
    package = "bitsandbytes"
    requirements = ("bitsandbytes==0.50.2",)

    def quantised(self, api: Any, side: str, source: ModelSource, model: PreTrainedModel) -> LoadedSide:
        logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it warns in every call of a matrix
        int8, head = side == BITSANDBYTES_INT8, model.get_output_embeddings()
        for path, linear in list(model.named_modules()):
            if type(linear) is nn.Linear and linear is not head:
                make = _int8 if int8 else _nf4
                model.set_submodule(path, make(api, linear))
        with torch.inference_mode():
            model(torch.zeros((1, 1), dtype=torch.long))  # packs the matrices for the processor, at first use
        weights = stored(
            model,
            side.removeprefix("bitsandbytes-"),
            lambda linear: linear.weight.nbytes + _scales(linear),
            quantised_head=False,
            computes="int8" if int8 else name_of(model.dtype),
        )
        impl = f"bitsandbytes {api.__version__}, {weights}; {impl_of('eager', model)}"
        return LoadedSide(side, impl, weights, model, source.tokenizer)


def _int8(api: Any, linear: nn.Linear) -> nn.Module:
    """A linear with a scale for each row. It rounds its inputs to int8 on the fly."""
    sizes = (linear.in_features, linear.out_features, linear.bias is not None)
    quantised = api.nn.Linear8bitLt(*sizes, has_fp16_weights=False, threshold=OUTLIER, device="meta")
    quantised.weight = api.nn.Int8Params(linear.weight.data, requires_grad=False, has_fp16_weights=False)
    return _filled(quantised, linear)


def _nf4(api: Any, linear: nn.Linear) -> nn.Module:
    """A linear with a scale for each group of `NF4_GROUP`. UserError for a matrix that cannot be packed for this
    processor.
    """
    sizes = (linear.in_features, linear.out_features, linear.bias is not None)
    dtype = linear.weight.dtype
    quantised = api.nn.Linear4bit(
        *sizes, compute_dtype=dtype, compress_statistics=False, quant_type="nf4", device="meta"
    )
    if quantised.support_avx512bf16_for_cpu and (linear.out_features % NF4_OUTPUTS or linear.in_features % NF4_GROUP):
        raise UserError(
            f"got a matrix of {linear.out_features} outputs and {linear.in_features} inputs, expected multiples of "
            f"{NF4_OUTPUTS} and {NF4_GROUP}: bitsandbytes packs NF4 in blocks of these where the processor has "
            f"AVX512-BF16; use {BITSANDBYTES_INT8}"
        )
    quantised.weight = api.nn.Params4bit(
        linear.weight.data, requires_grad=False, compress_statistics=False, quant_type="nf4", module=quantised
    )
    return _filled(quantised, linear)


def _filled(quantised: nn.Module, linear: nn.Linear) -> nn.Module:
    """The linear with its bias and its quantised weight. The move to the CPU quantises it."""
    quantised.bias = linear.bias
    return quantised.to("cpu").eval()


def _scales(linear: Any) -> int:
    """Bytes of a matrix's scales; 0 where it is not quantised."""
    row_scales, state = getattr(linear.weight, "SCB", None), getattr(linear.weight, "quant_state", None)
    return sum(scales.nbytes for scales in (row_scales, state and state.absmax) if scales is not None)
