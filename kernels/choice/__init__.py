"""Choice of the next token of each sequence from its logits, as Hugging Face's `generate` makes it.

`ScoreRule`s stand for its logits processors: the first ones change scores, the others remove tokens. Then the largest
score is chosen, or a draw by `torch.multinomial`. transformers chooses the same tokens for the same state of torch's
generator. If the rounding of torch's own sums would decide, there is no result, and the caller uses transformers.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from ctypes import byref, c_double, c_uint64
from dataclasses import dataclass
from functools import cache, cached_property
from math import inf
from typing import Any

import torch
from torch import Tensor

from labkit.system.errors import UserError, UserTypeError

from .. import build
from ..build import INT, LONG, POINTER, fields, mirrors, same_in_cpp
from ..checks import ArgumentCheck, checked, flag

PENALTY_OF_TEXT, PENALTY_OF_IDS, TEMPERATURE, SET_SCORES, ONLY_TOKENS, BIAS, DECAY, NGRAM = range(8)
TOP_K, TOP_P, MIN_P, TYPICAL, EPSILON, ETA = range(8, 14)
WITH_IDS = (PENALTY_OF_IDS, SET_SCORES, ONLY_TOKENS, BIAS, DECAY)
WORDS = 624  # of the Mersenne twister
TRIED = 1000  # draws that are compared with torch's

same_in_cpp({"kTemperature": TEMPERATURE, "kTopK": TOP_K, "kEta": ETA})
build.declare(
    "labkit_choose",
    *(POINTER, LONG, LONG, POINTER, LONG, LONG, POINTER, LONG, POINTER, POINTER, POINTER, INT),
    allocates=True,
)


@mirrors("ScoreRule")
class CScoreRule(ctypes.Structure):
    _fields_ = fields((INT, "kind keep"), (c_double, "value"), (POINTER, "ids"), (LONG, "count"))


@mirrors("TwisterState")
class CTwisterState(ctypes.Structure):
    _fields_ = fields((c_uint64, "seed"), (INT, "left seeded"), (c_uint64, "next"), (c_uint64 * WORDS, "words"))


@dataclass(frozen=True)
class ScoreRule:
    """One rule. Which fields it uses depends on its kind.

    kind: one of the constants above. Rules from TOP_K on remove tokens, and come after all others.
    value: the penalty, temperature, probability, mass, score, bias or factor.
    ids: int64 [n] in the vocabulary; for PENALTY_OF_IDS [B, n], for BIAS a sequence of tokens.
    count: k of TOP_K; tokens of an NGRAM; of PENALTY_OF_TEXT the first tokens that have no penalty.
    keep: the least number of tokens that stay.
    """

    kind: int
    value: float = 0.0
    ids: Tensor | None = None
    count: int = 0
    keep: int = 1

    @cached_property
    def c(self) -> CScoreRule:
        count = self.count if self.ids is None else self.ids.shape[-1]
        return CScoreRule(self.kind, self.keep, self.value, None if self.ids is None else self.ids.data_ptr(), count)


def _logits(name: str, logits: Tensor, call: ArgumentCheck) -> None:
    call.device = torch.device("cpu")
    call.tensor(name, logits, torch.float32, "batch", "vocabulary")


def _text(name: str, text: Tensor, call: ArgumentCheck) -> None:
    call.tensor(name, text, torch.int64, "batch", "length")


def _rules(name: str, rules: Sequence[ScoreRule], call: ArgumentCheck) -> None:
    if not isinstance(rules, list | tuple):
        raise UserTypeError(f"{name}: expected a list or tuple of ScoreRules, got {type(rules).__name__}")
    for place, rule in enumerate(rules):
        _rule(f"{name}[{place}]", rule, call)
        if place and rule.kind < TOP_K <= rules[place - 1].kind:
            raise UserError(
                f"{name}[{place}]: got kind {rule.kind} after kind {rules[place - 1].kind}; put the rules that remove "
                f"tokens, of kind {TOP_K} to {ETA}, after all others"
            )


def _rule(name: str, rule: ScoreRule, call: ArgumentCheck) -> None:
    if not isinstance(rule, ScoreRule):
        raise UserTypeError(f"{name}: expected a ScoreRule, got {type(rule).__name__}")
    kind = call.number(f"{name}.kind", rule.kind, 0, ETA)
    call.number(f"{name}.keep", rule.keep, 1)
    least, most = (0, 1) if kind > TOP_K else (0, inf) if kind <= TEMPERATURE else (-inf, inf)
    if rule.value != -inf or kind not in (SET_SCORES, ONLY_TOKENS, BIAS):
        call.real(f"{name}.value", rule.value, least, most)
    if kind in (TOP_K, NGRAM):
        call.number(f"{name}.count", rule.count, 1)
    elif kind == PENALTY_OF_TEXT:
        call.number(f"{name}.count", rule.count, 0, call.sizes["length"])
    else:
        call.one_of(f"{name}.count", rule.count, (0,))
    if kind in WITH_IDS:
        call.tensor(f"{name}.ids", rule.ids, torch.int64, *("batch",) * (kind == PENALTY_OF_IDS), None)
        assert rule.ids is not None
        call.within(f"{name}.ids", rule.ids, call.sizes["vocabulary"], "the tokens of the vocabulary")
    elif rule.ids is not None:
        raise UserError(f"{name}.ids: got {type(rule.ids).__name__}, expected None for kind {kind}")


def _process(name: str, process: Any, call: ArgumentCheck) -> None:
    if process is not None and not callable(process):
        raise UserTypeError(f"{name}: expected a function or None, got {type(process).__name__}")


@checked(logits=_logits, text=_text, rules=_rules, samples=flag, process=_process)
def choose(
    logits: Tensor,
    text: Tensor,
    rules: Sequence[ScoreRule],
    *,
    samples: bool,
    threads: int = 1,
    process: Callable[[Tensor], Tensor] | None = None,
) -> Tensor | None:
    """logits float32 [B, V] on the CPU, the text so far int64 [B, T] -> the next token int64 [B] of each sequence.

    samples: whether to draw, with the default generator of torch, which is advanced as by transformers.
    threads: share the sequences.
    process: does with torch what the rules do: indices of sequences int64 [n] -> their scores float32 [n, V]. It is
    called for sequences in which the rounding of torch's sums decides; None: there is no result then.

    None also for logits that are NaN, infinite or all removed. The generator has not changed then. The engine's own,
    unchecked calls may pass text of any integer type and with any strides.
    """
    batch, vocab = logits.shape
    text = text.to("cpu", torch.int64)
    if text.stride(-1) != 1:
        text = text.contiguous()
    chosen = torch.full((batch,), -1)
    draws_itself = samples and draws_like_torch()
    state = torch.get_rng_state() if samples else torch.empty(0)  # a copy, which the call advances if it draws itself
    draws = torch.empty(batch, vocab).exponential_() if samples and not draws_itself else None
    library = build.in_use_already() or build.in_use("float32")

    def unsure(scores: Tensor, rules: Sequence[ScoreRule]) -> int:
        count: int = library.labkit_choose(
            scores.data_ptr(),
            batch,
            vocab,
            text.data_ptr(),
            text.shape[1],
            text.stride(0),
            byref((CScoreRule * len(rules))(*(rule.c for rule in rules))),
            len(rules),
            state.data_ptr() if draws_itself else None,
            None if draws is None else draws.data_ptr(),
            chosen.data_ptr(),
            threads,
        )
        return count

    left = unsure(logits.contiguous(), rules)
    if left and process is not None:
        sequences, scores = (chosen < 0).nonzero().flatten(), logits.clone(memory_format=torch.contiguous_format)
        scores[sequences] = process(sequences)
        left = unsure(scores, ())
    if draws_itself or (samples and left):
        torch.set_rng_state(state)
    return None if left else chosen


@cache
def draws_like_torch() -> bool:
    """Whether this torch and the C++ code draw the same numbers: builds of torch with MKL may draw others."""
    generator = torch.Generator()
    expected = torch.empty(TRIED).exponential_(generator=generator.manual_seed(0))
    after = generator.get_state()
    uniform = torch.rand(TRIED, dtype=torch.float64, generator=generator.manual_seed(0))
    return torch.equal((-torch.log1p(-uniform)).float(), expected) and torch.equal(generator.get_state(), after)
