"""torchao: matrices of int8 or int4 that PyTorch's compiler multiplies, in the vanilla model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from labkit.engine.vanilla.hf_graph import check_static_cache
from labkit.harness.compare.loaded_side import LoadedSide
from labkit.harness.compare.peers.in_memory import InMemory, stored
from labkit.harness.compare.vanilla_sides import impl_of
from labkit.harness.stored_weights import name_of
from labkit.weights.source import ModelSource

TORCHAO_INT8 = "torchao-int8"
TORCHAO_INT4 = "torchao-int4"
GROUP = 32
INT4_OUTPUTS = 16  # rows of the blocks in which PyTorch packs int4 for CPUs
FREEZING = {"freezing": True}  # the compiler multiplies int8 directly only if weights are constants


class TorchAo(InMemory):
    """Quantised weights only, compiled, with a static cache. The LM head is quantised too, if its shape allows it."""

    name = "torchao"
    package = "torchao"
    requirements = ("torchao==0.18.0",)

    def quantised(self, api: Any, side: str, source: ModelSource, model: PreTrainedModel) -> LoadedSide:
        check_static_cache(model)
        name = side.removeprefix("torchao-")
        kind, fits = (_int4(), _fits_int4) if side == TORCHAO_INT4 else (_int8(), _is_linear)
        api.quantization.quantize_(model, kind, filter_fn=fits)
        weights = stored(
            model,
            name,
            lambda linear: _bytes(linear.weight),
            quantised_head=fits(model.get_output_embeddings(), ""),
            computes=name_of(model.dtype),
        )
        impl = (
            f"torchao {api.__version__}, {weights}, computes in {name_of(model.dtype)}; "
            f"{impl_of('torch.compile, static cache', model)}"
        )
        model.forward = torch.compile(model.forward, options=dict(FREEZING))  # type: ignore[method-assign]
        return LoadedSide(side, impl, weights, model, source.tokenizer, options={"cache_implementation": "static"})


def _int8() -> Any:
    """Configuration with a scale for each row."""
    from torchao.quantization import Int8WeightOnlyConfig  # type: ignore[import-not-found]

    return Int8WeightOnlyConfig()


def _int4() -> Any:
    """Configuration with a scale and a zero for each group. torchao calls it a prototype. The other int4 configurations
    are for GPUs only, or, for int8 times int4, need C++ kernels that no published package has.
    """
    from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig  # type: ignore[import-not-found]

    return PrototypeInt4WeightOnlyConfig(group_size=GROUP)


def _is_linear(module: nn.Module, path: str) -> bool:
    return isinstance(module, nn.Linear)


def _fits_int4(module: nn.Module, path: str) -> bool:
    """Whether PyTorch can pack a module; other modules stay as they are."""
    return isinstance(module, nn.Linear) and module.in_features % GROUP == module.out_features % INT4_OUTPUTS == 0


def _bytes(weight: Tensor) -> int:
    """Bytes of all parts of a quantised tensor, or of a plain tensor."""
    if not hasattr(weight, "__tensor_flatten__"):
        return weight.nbytes
    parts, _ = weight.__tensor_flatten__()
    return sum(getattr(weight, part).nbytes for part in parts)
