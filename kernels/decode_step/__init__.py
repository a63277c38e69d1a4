"""A step of a range of layers in one C call: embedding, layers, LM head, with a clock stamp behind every stage.

The same pieces as the single ops, under one parallel region: no Python, no allocation and no thread wake-up between
stages. There is no reference implementation of its own; the reference is the sequence of reference ops.
"""

import ctypes
from ctypes import byref, c_int32, c_int64, c_void_p

import numpy as np
import torch
from torch import Tensor

from .. import build
from ..abi import CCache, CRotary, CRows
from ..all_reduce import Exchange
from ..reading import USUAL
from ..types import NO_ROTARY, Rotary, Rows, pointer
from .weights import STAGES_PER_LAYER, EmbeddingWeights, HeadWeights, LayerWeights, ModelWeights

__all__ = ["STAGES_PER_LAYER", "DecodeStep", "EmbeddingWeights", "HeadWeights", "LayerWeights", "ModelWeights"]


class CStepArgs(ctypes.Structure):
    _fields_ = [
        ("rows", CRows),
        ("rotary", CRotary),
        ("caches", c_void_p),
        ("past", c_int64),
        ("tokens", c_void_p),
        ("keep", c_int64),
        ("logits", c_void_p),
        ("argmax", c_void_p),
        ("hidden", c_void_p),
        ("inputs", c_void_p),
        ("outputs", c_void_p),
        ("stamps", c_void_p),
        ("workspace", c_void_p),
        ("threads", c_int32),
        ("exchange", c_void_p),
        ("own_logits", c_int32),
        ("reading", c_int32),
    ]


class DecodeStep:
    """Runs steps of one model; holds the library, the workspace and the stamps, and no model state.

    exchange: with the ranks that have the other parts of the model, which must run the same steps; its slots hold as
    many rows as a step has. One instance must not run two steps at a time.
    """

    def __init__(self, model: ModelWeights, exchange: Exchange | None = None) -> None:
        self.model, self.exchange = model, exchange
        self.library = build.load(model.weight_type)
        self.stages = model.stages(exchange.size if exchange else 1)
        self.stamps = np.zeros(3 + len(self.stages) * len(model.layers), dtype=np.int64)
        self._workspace = torch.empty(0, dtype=torch.uint8)
        self._sized_for = (0, 0)
        self._args = CStepArgs(
            stamps=self.stamps.ctypes.data, exchange=ctypes.addressof(exchange.c) if exchange else None
        )

    def __call__(
        self,
        tokens: Tensor | None,
        rows: Rows,
        rotary: Rotary | None,
        caches: "ctypes.Array[CCache]",
        past: int,
        *,
        threads: int,
        keep: int = 0,
        logits: Tensor | None = None,
        argmax: Tensor | None = None,
        hidden: Tensor | None = None,
        own_logits: bool = False,
        inputs: Tensor | None = None,
        outputs: Tensor | None = None,
        reading: int = USUAL,
    ) -> None:
        """Writes keys and values of the new tokens at slot `past` of every cache; layers may share one.

        In: tokens int64 [B, T], contiguous, each in the vocabulary (the caller checks); for a range of layers without
        an embedding inputs float32 [N, H], contiguous.
        Out: for the last `keep` tokens of each sequence `logits` float32 [B*keep, V] or `argmax` int64 [B*keep] (-1: no
        logit is a number), and `hidden` float32 [B*keep, H] after the final norm if given; outputs float32 [N, H],
        contiguous: all rows after the final norm, if there is one, without a head.
        `reading`: how the weights are read, an index into READINGS.
        `own_logits`: fill in only the columns of this rank's vocabulary. Raises RuntimeError where another rank has
        ended.
        """
        args = self._args
        args.rows = rows.c
        args.rotary = rotary.c if rotary else NO_ROTARY
        args.caches = ctypes.addressof(caches)
        args.past = past
        args.tokens = pointer(tokens)
        args.keep = keep
        args.logits, args.argmax, args.hidden = pointer(logits), pointer(argmax), pointer(hidden)
        args.inputs, args.outputs = pointer(inputs), pointer(outputs)
        args.threads, args.own_logits, args.reading = threads, own_logits, reading
        args.workspace = self._workspace_for(rows.batch * rows.tokens, threads)
        self.library.labkit_step(byref(self.model.c), byref(args))
        if self.exchange is not None:
            self.exchange.check()

    def _workspace_for(self, rows: int, threads: int) -> int:
        if rows > self._sized_for[0] or threads > self._sized_for[1]:
            size = self.library.labkit_workspace_bytes(byref(self.model.c), rows, threads)
            self._workspace = torch.empty(size + 64, dtype=torch.uint8)
            self._sized_for = (rows, threads)
        return -(-self._workspace.data_ptr() // 64) * 64
