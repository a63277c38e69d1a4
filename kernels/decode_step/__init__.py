"""A step of a range of layers in one C call: embedding, layers, LM head, with the time of every stage.

It runs the code of the single ops in one parallel region: no Python, no allocation and no thread wake-up between
stages. Its reference is the sequence of reference ops.
"""

import ctypes
from collections.abc import Callable, Sequence
from ctypes import byref
from typing import Any

import numpy as np
import torch
from torch import Tensor

from labkit.system.errors import UserError

from .. import build, checks
from ..abi import CCache, CRotary
from ..all_reduce import Exchange
from ..build import INT, LONG, POINTER, fields
from ..cache_stream import CachePass, CacheStream
from ..dispatch import MOST_THREADS
from ..layer_stream import LayerStream
from ..memory import ALIGNMENT, aligned
from ..reading import USUAL
from ..slot_stream import require_whole
from ..types import NO_ROTARY, Rotary, pointer
from .arguments import AfterStep, CAheadArgs, CChunk, ChunkArgs, TextRules, c_address, in_generator
from .mlps import AMONG_EXPERTS, OF_MLP, DenseMlp, MixtureMlp, SharedExpert
from .streamed_layers import StreamedLayers
from .weights import LAYER_STAGES, STAGES_PER_LAYER, EmbeddingWeights, HeadWeights, LayerWeights, ModelWeights

__all__ = [
    "AMONG_EXPERTS",
    "LAYER_STAGES",
    "OF_MLP",
    "STAGES_PER_LAYER",
    "ChunkArgs",
    "DecodeStep",
    "DenseMlp",
    "EmbeddingWeights",
    "HeadWeights",
    "LayerWeights",
    "MixtureMlp",
    "ModelWeights",
    "SharedExpert",
    "StreamedLayers",
    "TextRules",
    "layer_times",
    "no_times",
]

build.declare("labkit_step", POINTER, POINTER, allocates=True)
build.declare("labkit_steps_ahead", POINTER, POINTER, POINTER, result=True, allocates=True)
build.declare("labkit_workspace_bytes", POINTER, LONG, LONG, LONG, result=True)


@build.mirrors("StepArgs")
class CStepArgs(ctypes.Structure):
    _fields_ = fields(
        (POINTER, "chunks"),
        (LONG, "num_chunks"),
        (CRotary, "rotary"),
        (POINTER, "caches times workspace"),
        (INT, "threads"),
        (POINTER, "exchange"),
        (INT, "own_logits reading"),
        (POINTER, "stream blocks first_slot kv_stream"),
        (LONG, "kv_turn"),
        (POINTER, "kv_slot experts_read chosen experts"),
    )


def no_times(layers: int) -> np.ndarray:
    """Zeros in the order of `DecodeStep.times`."""
    return np.zeros(3 + len(LAYER_STAGES) * layers, dtype=np.int64)


def layer_times(times: np.ndarray) -> np.ndarray:
    """The times of the layers, [layers, LAYER_STAGES]. times: in the order of `DecodeStep.times`."""
    return times[1:-2].reshape(-1, len(LAYER_STAGES))


class DecodeStep:
    """Runs steps of one model. Holds the library, the workspace and the times, and no model state.

    exchange: with the ranks that have the other parts of the model and run the same steps. Its slots have room for the
    rows of a chunk.

    kv_streamed: whether every step has a pass over offloaded keys and values.

    times: nanoseconds of the latest call in the embedding, in each of LAYER_STAGES of each layer, in the head, and in
    the choice of tokens by rules.

    experts_read: number of experts that the latest call read in each layer, summed over its steps; 0 without mixtures.

    One instance must not run two steps at a time.
    """

    def __init__(
        self,
        model: ModelWeights,
        exchange: Exchange | None = None,
        streamed: StreamedLayers | None = None,
        kv_streamed: bool = False,
    ) -> None:
        self.model, self.exchange, self.streamed, self.kv_streamed = model, exchange, streamed, kv_streamed
        self.library = build.in_use(model.weight_type)
        self.times = no_times(len(model.layers))
        self.experts_read = np.zeros(len(model.layers), dtype=np.int64)
        self._workspace, self._workspace_at = torch.empty(0, dtype=torch.uint8), 0
        self._sized_for = (0, 0, 0)
        self._args = CStepArgs(times=self.times.ctypes.data, experts_read=self.experts_read.ctypes.data)
        self._args.exchange = ctypes.addressof(exchange.c) if exchange else None
        self._args.experts = model.expert_store.address if model.expert_store else None
        if streamed:
            assert isinstance(streamed.stream, LayerStream)
            self._blocks = (LONG * len(streamed.blocks))(*streamed.blocks)
            self._args.stream = streamed.stream.address
            self._args.blocks = ctypes.addressof(self._blocks)
            self._args.first_slot = streamed.stream.memory(0).data_ptr()

    def __call__(
        self,
        chunks: Sequence[ChunkArgs],
        rotary: Rotary | None,
        caches: "ctypes.Array[CCache]",
        *,
        threads: int,
        **options: Any,
    ) -> None:
        """Runs a step like `run`, and raises UserError for arguments that do not fit. The engine calls `run`, because
        the checks take several percent of a step of tiny-llama.
        """
        checks.ArgumentCheck("DecodeStep", "cpp").number("threads", threads, 1, MOST_THREADS)
        self._require_sizes(chunks, caches)
        for chunk in chunks:
            self._require_tensors(chunk, rotary)
        self.run(chunks, rotary, caches, threads=threads, **options)

    def run(
        self,
        chunks: Sequence[ChunkArgs],
        rotary: Rotary | None,
        caches: "ctypes.Array[CCache]",
        *,
        threads: int,
        own_logits: bool = False,
        reading: int = USUAL,
        kv_pass: CachePass | None = None,
        chosen: Tensor | None = None,
    ) -> None:
        """Runs the chunks in order; each sees the keys and values of the chunks before it. Layers may share a cache.

        `reading`: how the weights are read, an index into READINGS. `own_logits`: fill in only the columns of this
        rank's vocabulary. `kv_pass`: a pass over keys and values in a file; `caches` point into its first slot.
        `chosen`: gets the experts of all rows in each mixture, int64 [mixtures, rows, experts of a row]. Raises
        RuntimeError if another rank has ended, and RunError if a streamed layer, or its keys and values, can't be read.
        """
        assert (kv_pass is not None) == self.kv_streamed
        args, _alive = self._set(chunks, rotary, caches, threads, reading)
        args.own_logits, args.chosen = own_logits, pointer(chosen)
        if kv_pass is not None:
            assert isinstance(kv_pass.stream, CacheStream)
            args.kv_stream, args.kv_turn = kv_pass.stream.address, kv_pass.first
            args.kv_slot = kv_pass.stream.memory(0).data_ptr()
        failed = self.library.labkit_step(byref(self.model.c), byref(args))
        if self.exchange is not None:
            self.exchange.check()
        streams = [part.stream for part in (self.streamed, kv_pass) if part is not None]
        stores = [self.model.expert_store] if self.model.expert_store else []
        require_whole([*streams, *stores], bool(failed))

    def run_ahead(
        self,
        chunk: ChunkArgs,
        rotary: Rotary | None,
        caches: "ctypes.Array[CCache]",
        *,
        most: int,
        marks: Tensor,
        ended: Tensor,
        pad: int | None,
        choice: TextRules | None,
        threads: int,
        reading: int = USUAL,
        put: Callable[[Tensor], bool] | None = None,
    ) -> Tensor:
        """Runs steps: of one new token of each sequence, and then of the token that the step before chose. Returns the
        chosen tokens int64 [B, steps]. `times` has the sums over all steps.

        most: steps at most. The caches have room for them, and `rotary` has their positions. marks: uint8 [V]; 1: the
        token ends its sequence; 2: no step follows it. ended: uint8 [B], sequences that have ended. Once all have, no
        step follows. pad: token of sequences that have ended; None: they go on.

        choice: how tokens are chosen; None: the argmax, or -1 if all logits are NaN. With a choice `chunk` has logits,
        where the last step leaves its own. Tokens of -1 in the last step are left to the caller.

        put: called with the tokens int64 [B] of each step, before the next one; not with tokens of -1. It must not
        raise. Once it returns False, no step follows. Meanwhile the instance may run other steps.
        """
        assert self.exchange is self.streamed is self.model.expert_store is chunk.inputs is None
        chosen = torch.empty(most, chunk.rows.batch, dtype=torch.int64)
        tensors, c_pad = (pointer(marks), pointer(ended), pointer(chosen)), -1 if pad is None else pad
        args, _alive = self._set([chunk], rotary, caches, threads, reading)
        args.own_logits, args.chosen = False, None
        with c_address(choice, most) as (c_choice, random_state):

            def after_step(step: int) -> bool:
                assert put is not None
                times, experts_read = self.times.copy(), self.experts_read.copy()
                with in_generator(random_state):
                    goes_on = put(chosen[step])
                self.times[:], self.experts_read[:] = times, experts_read
                return goes_on

            c_put = AfterStep(after_step) if put else AfterStep()
            ahead = CAheadArgs(most, *tensors, c_pad, c_choice, ctypes.cast(c_put, POINTER))
            steps = self.library.labkit_steps_ahead(byref(self.model.c), byref(args), byref(ahead))
        return chosen[:steps].T

    def _require_sizes(self, chunks: Sequence[ChunkArgs], caches: "ctypes.Array[CCache]") -> None:
        """Raises UserError for sizes that do not fit."""
        layers = len(self.model.layers)
        if not chunks or len(caches) != layers:
            raise UserError(f"got {len(chunks)} chunks and {len(caches)} caches, expected chunks, and {layers} caches")
        capacity = min((cache.capacity for cache in caches), default=checks.MOST)
        for chunk in chunks:
            end, tokens = chunk.past + chunk.rows.tokens, chunk.rows.tokens
            if not 0 <= chunk.past < end <= capacity:
                raise UserError(f"cache of {capacity} slots can't take {tokens} tokens after {chunk.past}; grow it")
            if chunk.first_sequence < 0:
                raise UserError(f"got first_sequence = {chunk.first_sequence}, expected a sequence of the caches")
            if not 0 <= chunk.keep <= tokens:
                raise UserError(f"got keep = {chunk.keep}, expected 0 to {tokens}, the tokens of a sequence")

    def _require_tensors(self, chunk: ChunkArgs, rotary: Rotary | None) -> None:
        """Raises UserError for tensors of another type, shape or device, and for tokens and positions that have no row
        in the model's tables. The memory of caches is the caller's business.
        """
        model, batch, call = self.model, chunk.rows.batch, checks.ArgumentCheck("DecodeStep", "cpp")
        checks.heads("heads", model.heads, call)
        checks.rows("rows", chunk.rows, call)
        chunk.rows.require_slots(chunk.past + chunk.rows.tokens)
        call.sizes["table"] = max((layer.qkv.table for layer in model.layers), default=0)
        checks.maybe(checks.rotary)("rotary", rotary, call)
        needed = "tokens" if model.embedding else "inputs"
        if getattr(chunk, needed) is None:
            raise UserError(f"got no {needed}, expected them: this range of layers begins with {needed}")
        if model.head is None and not chunk.logits is chunk.argmax is None:
            raise UserError("got logits or argmax for a range of layers without a head, expected outputs")
        every, last = (chunk.num_rows, model.hidden), (batch * chunk.keep, model.hidden)
        for name, dtype, shape in (
            ("tokens", torch.int64, (batch, chunk.rows.tokens)),
            ("logits", torch.float32, (last[0], model.head.vocab_size if model.head else None)),
            ("argmax", torch.int64, last[:1]),
            ("hidden", torch.float32, last),
            ("inputs", torch.float32, every),
            ("outputs", torch.float32, every),
        ):
            if (tensor := getattr(chunk, name)) is not None:
                call.tensor(name, tensor, dtype, *shape)
        if chunk.keep and model.head and chunk.logits is chunk.argmax is None:
            raise UserError(f"got keep = {chunk.keep} without logits or argmax to fill; give one of them")
        if (embedding := model.embedding) is None:
            return
        assert chunk.tokens is not None
        if self.exchange is None:  # a rank has zero rows for the tokens of other ranks
            call.within("tokens", chunk.tokens, embedding.vocab.stop, "the tokens of the vocabulary")
        if embedding.positions is not None:
            rows = len(embedding.positions) - embedding.position_offset
            call.within("rows.positions", chunk.rows.positions, rows, "the rows of the table of positions")

    def _set(
        self,
        chunks: Sequence[ChunkArgs],
        rotary: Rotary | None,
        caches: "ctypes.Array[CCache]",
        threads: int,
        reading: int,
    ) -> tuple[CStepArgs, object]:
        """The arguments of a call in C, with all times 0, and what has to live as long as they are used."""
        args, counts = self._args, [chunk.num_rows for chunk in chunks]
        c_chunks = (CChunk * len(chunks))(*[chunk.c for chunk in chunks])
        args.chunks, args.num_chunks = ctypes.addressof(c_chunks), len(chunks)
        args.rotary = rotary.c if rotary else NO_ROTARY
        args.caches = ctypes.addressof(caches)
        args.threads, args.reading = threads, reading
        args.workspace = self._workspace_for(sum(counts), max(counts), threads)
        self.times.fill(0)
        self.experts_read.fill(0)
        return args, (c_chunks, self._workspace)

    def _workspace_for(self, all_rows: int, rows: int, threads: int) -> int:
        most_in_all, most, most_threads = self._sized_for
        if all_rows > most_in_all or rows > most or threads > most_threads:
            size = self.library.labkit_workspace_bytes(byref(self.model.c), all_rows, rows, threads)
            self._workspace = torch.empty(size + ALIGNMENT, dtype=torch.uint8)
            self._workspace_at = aligned(self._workspace.data_ptr())
            self._sized_for = all_rows, rows, threads
        return self._workspace_at
