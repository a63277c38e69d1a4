"""Choice of the next tokens by rules, as a kernel of a decode step on the GPU."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from ..gpu import ONE_PROGRAM, Launcher
from . import ScoreRule
from .triton_kernels import FIELDS, HEADER, choose_token

TABLE = 1 << 14  # numbers of a table of rules


class DeviceChoice:
    """The kernel and its memory, at addresses that a CUDA graph can keep.

    logits: float32 [B, V], from which every launch chooses a token of each sequence.
    length: most tokens of a text.
    samples: whether tokens are drawn; else the largest score is chosen.
    """

    def __init__(self, logits: Tensor, length: int, *, samples: bool) -> None:
        self.logits, self.samples = logits, samples
        self.scores, self.before, self.draws = (torch.ones_like(logits) for _ in range(3))
        self.text, self.table, self.chosen = (
            torch.zeros(size, dtype=torch.int64, device=logits.device)
            for size in ((len(logits), length), (TABLE,), (len(logits),))
        )
        self._rules: Sequence[ScoreRule] = ()
        self._generator = torch.empty(0)  # state before the draws

    def set(self, text: Tensor, rules: Sequence[ScoreRule]) -> bool:
        """Sets texts int64 [B, T] and rules for the next launch, and draws the numbers that transformers would draw.
        False: the texts or the rules are too long, and nothing is drawn.
        """
        if text.shape[1] > self.text.shape[1]:
            return False
        if len(rules) != len(self._rules) or any(new is not old for new, old in zip(rules, self._rules, strict=True)):
            numbers = _table(rules)
            if len(numbers) > TABLE:
                return False
            self.table[: len(numbers)].copy_(torch.tensor(numbers))
            self._rules = rules
        self.table[0] = text.shape[1]
        self.text[: len(text), : text.shape[1]].copy_(text)
        if self.samples:
            self._generator = self._random.get_rng_state()
            self.draws[: len(text)].exponential_()
        return True

    @property
    def _random(self) -> Any:
        """The module with the generator of the device."""
        return torch.cuda if self.logits.is_cuda else torch

    def launch(self, launch: Launcher) -> None:
        batch, vocab = self.logits.shape
        launch(
            choose_token,
            (batch,),
            ONE_PROGRAM,
            tokens_ptr=self.chosen,
            scores_ptr=self.scores,
            before_ptr=self.before,
            logits_ptr=self.logits,
            draws_ptr=self.draws,
            text_ptr=self.text,
            text_stride=self.text.stride(0),
            table_ptr=self.table,
            V=vocab,
            SAMPLES=self.samples,
            BLOCK=min(4096, triton.next_power_of_2(vocab)),
        )

    def tokens(self, batch: int) -> Tensor | None:
        """The chosen tokens int64 [B] of the first sequences. None: the rounding of torch's sums could decide, or no
        logit is a number; the generator has not changed then.
        """
        tokens = self.chosen[:batch].clone()
        if bool((tokens >= 0).all()):
            return tokens
        if self.samples:
            self._random.set_rng_state(self._generator)
        return None


def _table(rules: Sequence[ScoreRule]) -> list[int]:
    """The rules as the kernel reads them: length of the text, number of rules, fields of each rule, all ids."""
    fields, ids = [0, len(rules)], list[int]()
    first_id = HEADER + FIELDS * len(rules)
    for rule in rules:
        own = [] if rule.ids is None else rule.ids.flatten().tolist()
        count = rule.count if rule.ids is None else rule.ids.shape[-1]
        bits = ctypes.c_int32.from_buffer(ctypes.c_float(rule.value)).value
        fields += [rule.kind, rule.keep, bits, first_id + len(ids), count]
        ids += own
    return fields + ids
