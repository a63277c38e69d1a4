"""Arguments of several steps in one call, and of the choice of their tokens by rules."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from ctypes import addressof
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from ..build import LONG, POINTER, fields, mirrors
from ..choice import CScoreRule, ScoreRule
from ..types import pointer


@mirrors("ChoiceAhead")
class CChoiceAhead(ctypes.Structure):
    _fields_ = fields((POINTER, "text"), (LONG, "length text_stride"), (POINTER, "rules rules_before state"))


@mirrors("AheadArgs")
class CAheadArgs(ctypes.Structure):
    _fields_ = fields((LONG, "most"), (POINTER, "marks ended chosen"), (LONG, "pad"), (POINTER, "choice"))


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
def c_address(choice: TextRules | None, most: int) -> Iterator[int | None]:
    """Address of the arguments in C for `most` steps; None: no choice by rules. After the steps the generator is set to
    where they have advanced it.
    """
    if choice is None:
        yield None
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
    yield addressof(c_choice)
    if state is not None:
        torch.set_rng_state(state)
