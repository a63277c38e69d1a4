"""A decode step in Triton: five kernels per layer, three if attention and MLP start from the same rows, and seven if
outputs are normed before they are added to the residual.

Everything that changes from step to step (token, slot, position) is in tensors on the device. The last kernel of a step
writes them for the next step, so that a recorded step, a CUDA graph, can be replayed.
"""

from contextlib import AbstractContextManager, nullcontext
from functools import partial

from torch import Tensor

from labkit.stages import Stage

from ..cache_stream import CachePass
from ..gpu import Launcher
from ..layer import run_layer
from ..plain import normalise
from ..types import check_heads
from . import StreamedLayers
from .triton_ends import Around, StepInputs, TritonEnds
from .triton_layer import TritonRegions
from .weights import LayerWeights, ModelWeights


class TritonStep:
    """One token for each of B sequences, through a range of layers: from the embedding, or from rows, to the next token
    or the logits, or to rows without a head.

    streamed: layers that pass through the slots of a stream; None: all layers are resident.
    """

    def __init__(self, model: ModelWeights, launch: Launcher, streamed: StreamedLayers | None = None) -> None:
        check_heads(model.heads, "triton")
        self.model, self.launch, self.streamed = model, launch, streamed
        self.ends = TritonEnds(model, launch)

    def __call__(self, inputs: StepInputs, around: Around, *, greedy: bool, kv_pass: CachePass | None = None) -> Tensor:
        """Returns the chosen tokens, `state.tokens`, or logits float32 [B, V]; without a head rows float32 [B, H]. Keys
        and values go to slot `state.past`.

        Each stage is launched within `around(stage, layer)`. kv_pass: a pass over offloaded keys and values, which are
        in `caches` at their layer's turn; None: all are resident.
        """
        w, hidden = self.model, inputs.buffers.given
        if w.embedding is not None:
            with around(Stage.EMBED, None):
                hidden = self.ends.embed(w.embedding, inputs)
        first_turn = self.streamed.stream.begin_pass() if self.streamed else 0
        for index, (layer, cache) in enumerate(zip(w.layers, inputs.caches, strict=True)):
            fetched = nullcontext() if kv_pass is None else kv_pass.resident(index, around(Stage.FETCH_KV, index))
            with self._in_memory(index, layer, first_turn, around) as resident, fetched:
                regions = TritonRegions(resident, self.model, self.launch, inputs, cache, hidden)
                hidden = run_layer(regions, partial(_around_region, around, index))
        if w.head is None:
            self.ends.move_on(inputs, around)
            return normalise(w.final_norm, hidden)
        best = self.ends.head(w.head, hidden, inputs, around, greedy)
        self.ends.move_on(inputs, around, best)
        return inputs.state.tokens if greedy else inputs.buffers.logits

    def _in_memory(
        self, index: int, layer: LayerWeights, first_turn: int, around: Around
    ) -> AbstractContextManager[LayerWeights]:
        if self.streamed is None:
            return nullcontext(layer)
        return self.streamed.resident(index, layer, first_turn, around(Stage.FETCH, index))


def _around_region(around: Around, layer: int, region: Stage) -> AbstractContextManager[object]:
    return around(region, layer)
