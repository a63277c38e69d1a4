"""Arguments of a step and of several steps in one call, with their mirrors in C."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from ctypes import addressof
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from ..abi import CRows
from ..build import LONG, POINTER, fields, mirrors
from ..choice import CScoreRule, ScoreRule
from ..types import Rows, pointer


@mirrors("Chunk")
class CChunk(ctypes.Structure):
    _fields_ = fields(
        (CRows, "rows"),
        (LONG, "past"),
        (POINTER, "tokens"),
        (LONG, "keep"),
        (POINTER, "logits argmax hidden inputs outputs"),
        (LONG, "first_sequence"),
    )


class ChunkArgs(NamedTuple):
    """Tokens that go through a layer together: B sequences, T tokens of each, N = B * T. All tensors are contiguous.

    The step fills the given tensors among `logits`, `argmax`, `hidden` and `outputs`.
    """

    rows: Rows
    past: int  # keys and values are written from this slot of every cache on
    tokens: Tensor | None = None  # int64 [B, T], each in the vocabulary (the caller checks)
    keep: int = 0  # the last tokens of each sequence that logits, argmax and hidden are for
    logits: Tensor | None = None  # float32 [B*keep, V]
    argmax: Tensor | None = None  # int64 [B*keep]; -1: all logits are NaN
    hidden: Tensor | None = None  # float32 [B*keep, H], after the final norm
    inputs: Tensor | None = None  # float32 [N, H], instead of tokens for a range of layers without an embedding
    outputs: Tensor | None = None  # float32 [N, H], for a range without a head: all rows, after the final norm if any
    first_sequence: int = 0  # of the cache: the chunk has this one and the next B - 1

    @property
    def num_rows(self) -> int:
        """N: rows of all sequences."""
        return self.rows.batch * self.rows.tokens

    @property
    def c(self) -> CChunk:
        tensors = (self.logits, self.argmax, self.hidden, self.inputs, self.outputs)
        pointers = map(pointer, tensors)
        return CChunk(self.rows.c, self.past, pointer(self.tokens), self.keep, *pointers, self.first_sequence)


@mirrors("ChoiceAhead")
class CChoiceAhead(ctypes.Structure):
    _fields_ = fields((POINTER, "text"), (LONG, "length text_stride"), (POINTER, "rules rules_before state"))


@mirrors("AheadArgs")
class CAheadArgs(ctypes.Structure):
    _fields_ = fields((LONG, "most"), (POINTER, "marks ended chosen"), (LONG, "pad"), (POINTER, "choice after_step"))


AfterStep = ctypes.CFUNCTYPE(LONG, LONG)  # `after_step`


@dataclass(frozen=True)
class TextRules:
    """Choice of the next tokens of texts by rules.

    tokens: int64 [B, T], the tokens of a text consecutive. The first `length` are the text so far; steps write the
    tokens that they choose after them.
    rules: returns the rules at a length.
    samples: whether tokens are drawn, with torch's default generator, which the steps advance. It needs
    `draws_like_torch`.
    """

    tokens: Tensor
    length: int
    rules: Callable[[int], Sequence[ScoreRule]]
    samples: bool


@contextmanager
def c_address(choice: TextRules | None, most: int) -> Iterator[tuple[int | None, Tensor | None]]:
    """Address of the arguments in C for `most` steps, None: no choice by rules; and the state of torch's generator,
    which the steps advance, None: they draw nothing. After the steps the generator has this state.
    """
    if choice is None:
        yield None, None
        return
    rules_of_steps = [choice.rules(choice.length + step) for step in range(most)]
    before = (LONG * (most + 1))(*accumulate(map(len, rules_of_steps), initial=0))
    rules = (CScoreRule * before[most])(*(rule.c for rules_of_step in rules_of_steps for rule in rules_of_step))
    state = torch.get_rng_state() if choice.samples else None
    c_choice = CChoiceAhead(
        choice.tokens.data_ptr(),
        choice.length,
        choice.tokens.stride(0),
        addressof(rules),
        addressof(before),
        pointer(state),
    )
    yield addressof(c_choice), state
    if state is not None:
        torch.set_rng_state(state)


@contextmanager
def in_generator(state: Tensor | None) -> Iterator[None]:
    """Context in which torch's generator has this state of its own, and may advance; None: it is left alone."""
    if state is None:
        yield
        return
    torch.set_rng_state(state)
    yield
    state.copy_(torch.get_rng_state())
