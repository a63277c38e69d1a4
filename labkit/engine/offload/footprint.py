"""Memory of an engine: weights, slots, cache and workspace, counted before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

import torch

from labkit.engine.offload.room import fewest_experts
from labkit.engine.runners.step import CHUNK_ROWS
from labkit.kernels.codes import row_stride
from labkit.kernels.types import float_dtype, padded_head_dim
from labkit.system.errors import UserError
from labkit.weights.capacity import layer_bytes, layers_bytes, outside_bytes
from labkit.weights.spec import WeightSpec

ROWS_OF_H = 5  # rows of the workspace (decode_step/step.h), besides `h`, that are as wide as the model
OTHERS = 128 << 20  # bytes for thread-local memory, rotary tables and a request's Python objects


@dataclass(frozen=True)
class Footprint:
    """Memory of a rank's engine on a CPU, in bytes."""

    outside: int  # weights outside the layers
    layer: int  # the largest layer's weights, and so one slot
    layers: int  # number of layers
    kv_per_token: int  # one token's keys and values in all layers
    row: int  # workspace of a row that goes through a layer
    kept_row: int  # workspace of a row that waits between two layers
    logits_row: int  # workspace of a row with logits
    least_by_experts: int | None = None  # weights in memory where as many experts as possible are not; None: no experts
    smaller: int = 0  # the difference of all layers' weights to as many of the largest layer

    @classmethod
    def of(cls, spec: WeightSpec, kv_dtype: torch.dtype | None = None) -> Footprint:
        """Returns the footprint of a rank. kv_dtype: as `init_inference` takes it."""
        config = spec.part.local
        wide = row_stride(max(config.hidden_size, config.embedding_size))
        heads = row_stride((config.num_heads + 2 * config.num_kv_heads) * config.head_dim)
        context, inner = row_stride(config.num_heads * config.head_dim), row_stride(config.intermediate_size)
        stored = kv_dtype or float_dtype(spec.dtype)
        mixture = 0
        if experts := config.experts:
            inner = max(inner, row_stride(experts.shared), row_stride(config.dense_size))
            mixture = experts.chosen * (2 * wide + row_stride(config.intermediate_size) + 6) + 2 * experts.count
        numbers = padded_head_dim(config.head_dim) * stored.itemsize + (2 if stored == torch.int8 else 0)
        return cls(
            outside=outside_bytes(spec),
            layer=layer_bytes(spec),
            layers=config.num_layers,
            kv_per_token=2 * config.num_layers * config.num_kv_heads * numbers,
            row=4 * (ROWS_OF_H * wide + heads + context + inner + mixture),
            kept_row=4 * wide,
            logits_row=4 * config.vocab_size,
            smaller=config.num_layers * layer_bytes(spec) - layers_bytes(spec),
            least_by_experts=_least_by_experts(spec),
        )

    @property
    def weights(self) -> int:
        """Bytes of all weights."""
        return self.outside + self.layers * self.layer - self.smaller

    def _least(self, slots: int) -> int:
        """The least bytes of weights in memory: those outside the layers, and the slots."""
        return min(self.outside + slots * self.layer, self.weights)

    def beside_weights(self, batch: int, prompt: int, tokens: int) -> int:
        """Returns the bytes of everything except weights, for `batch` sequences of up to `tokens` tokens. The first
        `prompt` tokens are the prompt.
        """
        rows = batch * max(1, min(prompt, CHUNK_ROWS // batch))
        steps = rows * self.row + batch * prompt * self.kept_row + batch * self.logits_row
        return batch * tokens * self.kv_per_token + steps + OTHERS

    def for_weights(
        self, memory: float, batch: int, prompt: int, tokens: int, slots: int, *, by_experts: bool = False
    ) -> float:
        """Returns the bytes of `memory` that are left for weights: `resident_gb` of the option `offload`, in bytes.
        by_experts: of a mixture, experts are offloaded if layers would need more memory.

        Raises UserError for less memory than the least that works.
        """
        others = self.beside_weights(batch, prompt, tokens)
        least = self._least(slots)
        if by_experts and self.least_by_experts is not None:
            least = min(least, self.least_by_experts)
        least += others
        if memory < least:
            raise UserError(
                f"got {memory / 1e9:.3g} GB of memory for batch {batch} of {tokens} tokens; the least that works with "
                f"{slots} slots is {least / 1e9:.3g} GB: allow more, or a smaller batch or fewer tokens"
            )
        return memory - others

    def most_sequences(self, memory: float, prompt: int, tokens: int, slots: int) -> int:
        """Returns the largest batch that fits into `memory` bytes with as few resident layers as possible; 0: not even
        one sequence fits.
        """
        least = self._least(slots)

        def fits(batch: int) -> bool:
            return least + self.beside_weights(batch, prompt, tokens) <= memory

        low, high = 0, 1
        while fits(high):
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low


def _least_by_experts(spec: WeightSpec) -> int | None:
    if spec.config.experts is None:
        return None
    beside = layers_bytes(spec, experts=False)
    mixtures = sum(map(spec.config.has_experts, spec.part.layers))
    if not mixtures:
        return None
    expert = (layers_bytes(spec) - beside) / (mixtures * len(spec.part.experts))
    return outside_bytes(spec) + beside + ceil(fewest_experts(spec.part) * expert)
