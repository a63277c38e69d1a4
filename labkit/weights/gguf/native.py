"""Canonical weights made of the codes of a GGUF file, without dequantising them and quantising them again."""

from __future__ import annotations

from torch import Tensor

from labkit.kernels.codes import quantize
from labkit.kernels.types import Linear
from labkit.models.policy import Policy
from labkit.models.shards import Cut, Shard
from labkit.weights.canonical import Canonical, Loading, Weight, is_matrix
from labkit.weights.checkpoint.shard_file import Empty
from labkit.weights.gguf.tensors import BITS, FLOATS, GROUP, GgufTensors
from labkit.weights.protocol import finite


class NativeWeights:
    """A rank's canonical weights, as the file has them.

    A matrix whose tensors are all of one type in BITS keeps its codes and scales. A floating-point matrix becomes
    bfloat16. Matrices of all other types, such as K-quants, are dequantised and then quantised to 8 bits in groups of
    32.
    """

    def __init__(self, policy: Policy, tensors: GgufTensors, part: Shard) -> None:
        self._policy, self._tensors, self._part = policy, tensors, part

    def top(self, empty: Empty) -> Canonical:
        return Loading(self._part.top_shapes, lambda name: self._weight(name, None))

    def layer(self, index: int, empty: Empty) -> Canonical:
        return Loading(self._part.layer_shapes, lambda name: self._weight(name, index))

    def _weight(self, name: str, index: int | None) -> Weight:
        policy, part, tensors = self._policy, self._part, self._tensors
        if not is_matrix(name):
            return policy.tensor(part, name, index, self._floats)
        kinds = {tensors.kind(stored) for stored in policy.stored_names(name, index)}
        if len(kinds) == 1 and (kind := min(kinds)) in BITS:
            codes = policy.tensor(part, name, index, tensors.codes)
            scales = policy.assembled(part, name, index, tensors.scales)
            finite(scales, name)
            outputs, inputs = codes.shape
            return Linear(codes, None, outputs, inputs, "rows", scales, GROUP, BITS[kind])
        rows = policy.tensor(part, name, index, self._floats)
        outputs, inputs = rows.shape
        if kinds <= FLOATS.keys():
            return Linear(rows.bfloat16(), None, outputs, inputs, "rows")
        codes, scales = quantize(rows, GROUP)
        return Linear(codes, None, outputs, inputs, "rows", scales, GROUP)

    def _floats(self, name: str, cut: Cut | None) -> Tensor:
        return finite(self._tensors.get(name, None, cut), name)
