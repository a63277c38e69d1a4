"""Export of a model as a graph of one step: tokens and KV cache in, logits and KV cache out."""

from __future__ import annotations

import warnings
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from labkit.harness.compare.peers.in_memory import put_linears
from labkit.models.dtypes import FLOAT_DTYPES
from labkit.weights.source import ModelSource


class CachedStep(nn.Module):
    """One step of a model. The KV cache is a list in which keys and values of each layer alternate.

    `rows` names the cache row from which each sequence continues, as OpenVINO requires.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        self.takes_positions = "position_ids" in signature(model.forward).parameters

    def forward(self, tokens: Tensor, past: list[Tensor], rows: Tensor | None = None) -> tuple[Tensor, ...]:
        """The logits after the last token [sequence, vocabulary], then the cache with these tokens."""
        if rows is not None:
            past = [tensor.index_select(0, rows) for tensor in past]
        cache = DynamicCache()
        cache.layers = [_filled(keys, values) for keys, values in zip(past[::2], past[1::2], strict=True)]
        options: dict[str, Any] = {"past_key_values": cache, "use_cache": True, "logits_to_keep": 1}
        if self.takes_positions:  # one row per sequence: ONNX's rotary embedding does not share positions
            sequences, count = tokens.shape
            options["position_ids"] = (torch.arange(count) + past[0].shape[2]).expand(sequences, -1)
        output = self.model(tokens, **options)
        return output.logits[:, -1], *_tensors(cache)


def exported_step(source: ModelSource, dtype: str, *, rows: bool) -> tuple[ExportedProgram, list[Tensor]]:
    """The program of a `CachedStep` for any number of sequences, tokens and positions, and an example of its cache.

    It computes in float32, with weights that were rounded to `dtype` before. `rows`: whether it has that argument.
    """
    model = source.hf_model(FLOAT_DTYPES[dtype]).float()
    put_linears(model)
    tokens = torch.zeros((2, 2), dtype=torch.long)
    with torch.inference_mode():
        past = [tensor.clone() for tensor in _tensors(model(tokens, use_cache=True).past_key_values)]
    free = Dim.DYNAMIC
    inputs: dict[str, Any] = {"tokens": tokens, "past": past}
    shapes: dict[str, Any] = {"tokens": {0: free, 1: free}, "past": [{0: free, 2: free}] * len(past)}
    if rows:
        inputs["rows"], shapes["rows"] = torch.arange(2, dtype=torch.int32), {0: free}
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        program = torch.export.export(CachedStep(model), (), inputs, dynamic_shapes=shapes, strict=False)
    return program, past


def _tensors(cache: DynamicCache) -> list[Tensor]:
    return [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]


def _filled(keys: Tensor, values: Tensor) -> DynamicLayer:
    """A layer of a cache with these keys and values. Its own `update` would begin with an empty tensor."""
    layer = DynamicLayer()
    layer.keys, layer.values = keys, values
    layer.dtype, layer.device, layer.is_initialized = keys.dtype, keys.device, True
    return layer
