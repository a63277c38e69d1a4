"""The best continuations of beams, as Hugging Face's beam search chooses them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import byref

import torch
from torch import Tensor

from .. import build
from ..build import INT, LONG, POINTER, fields, mirrors
from . import CScoreRule, ScoreRule

build.declare("labkit_continue_beams", POINTER, LONG, LONG, POINTER, POINTER, INT, allocates=True)


@mirrors("BeamCall")
class CBeamCall(ctypes.Structure):
    _fields_ = fields(
        (POINTER, "log_probs scores"),
        (LONG, "beams vocab"),
        (POINTER, "tokens"),
        (LONG, "length stride"),
        (POINTER, "rules"),
        (LONG, "rule_count"),
    )


def continue_beams(
    log_probs: Tensor,
    scores: Tensor,
    tokens: Tensor,
    length: int,
    rules: Sequence[ScoreRule],
    *,
    count: int,
    threads: int = 1,
) -> tuple[Tensor, Tensor] | None:
    """Returns the `count` best sums of each text, float32 [B, count], and their places beam * V + token, int64.

    log_probs: float32 [B * n, V]. scores: float32 [B, n]. tokens: int64 [B, n, T], of the beams. All are contiguous and
    on the CPU. length: tokens of the texts so far. rules: change the log probabilities before scores are added.

    None: equal sums, or sums that are no numbers, leave the choice to torch. The caller makes sure that shapes fit.
    """
    texts, beams = scores.shape
    sums, places = torch.empty(texts, count), torch.empty(texts, count, dtype=torch.int64)
    c_rules = (CScoreRule * len(rules))(*(rule.c for rule in rules))
    call = CBeamCall(
        log_probs.data_ptr(),
        scores.data_ptr(),
        beams,
        log_probs.shape[1],
        tokens.data_ptr(),
        length,
        tokens.stride(1),
        ctypes.addressof(c_rules),
        len(rules),
    )
    library = build.any_library()
    unsure = library.labkit_continue_beams(byref(call), texts, count, sums.data_ptr(), places.data_ptr(), threads)
    return None if unsure else (sums, places)
