"""The logits processors of transformers that the kernel `choose` knows, as its rules.

A maker is called once for each processor of a text. It returns a function from the length of the text to the rules of
the processor; None: `choose` would not do the same as the processor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from math import inf
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList
from transformers.generation import logits_process as hf

from labkit.kernels import choice
from labkit.kernels.choice import ScoreRule

RulesAt = Callable[[int], Sequence[ScoreRule]]  # by the number of tokens so far
Maker = Callable[[Any, tuple[int, int]], RulesAt | None]  # of a processor, and the shape (B, V) of its scores


def known_rules(processors: LogitsProcessorList, shape: tuple[int, int]) -> RulesAt | None:
    """The rules that do the same as these processors, by the number of tokens so far; None: no rules do the same.

    shape: (B, V) of the scores. Only transformers' own classes are known, not classes that are derived from them.
    """
    kinds = [type(processor) for processor in processors]
    if any(kind not in KNOWN for kind in kinds):
        return None
    if any(kind in REMOVALS and later in CHANGES for kind, later in pairwise(kinds)):
        return None
    made = [KNOWN[kind](processor, shape) for kind, processor in zip(kinds, processors, strict=True)]
    known = [rules_at for rules_at in made if rules_at is not None]
    if len(known) < len(made):
        return None
    return lambda length: [rule for rules_at in known for rule in rules_at(length)]


def _always(*rules: ScoreRule) -> RulesAt:
    return lambda length: rules


def _if(condition: Callable[[int], bool], rule: ScoreRule) -> RulesAt:
    return lambda length: (rule,) if condition(length) else ()


def _ids(tokens: Any) -> Tensor:
    return torch.as_tensor(tokens, dtype=torch.int64, device="cpu").flatten().contiguous()


def _penalty(processor: hf.RepetitionPenaltyLogitsProcessor, shape: tuple[int, int]) -> RulesAt | None:
    if isinstance(processor.prompt_ignore_length, Tensor):
        return None
    ignored = processor.prompt_ignore_length or 0
    return lambda length: (ScoreRule(choice.PENALTY_OF_TEXT, processor.penalty, count=min(ignored, length)),)


def _penalty_of_prompt(processor: hf.EncoderRepetitionPenaltyLogitsProcessor, shape: tuple[int, int]) -> RulesAt | None:
    ids, (batch, vocab_size) = processor.encoder_input_ids, shape
    if ids.dim() != 2 or batch % len(ids) or int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
        return None
    ids = ids.repeat_interleave(batch // len(ids), dim=0).to("cpu", torch.int64)
    return _always(ScoreRule(choice.PENALTY_OF_IDS, processor.penalty, ids.contiguous()))


def _biases(processor: hf.SequenceBiasLogitsProcessor, shape: tuple[int, int]) -> RulesAt | None:
    biases = processor.sequence_bias
    last = [sequence[-1] for sequence in biases]
    if any(token >= shape[1] for sequence in biases for token in sequence):
        return None  # transformers has the words for it
    if len(set(last)) < len(last) and set(biases.values()) != {-inf}:
        return None  # biases of one token are added up before they are added to its score
    return _always(*(ScoreRule(choice.BIAS, bias, _ids(sequence)) for sequence, bias in biases.items()))


def _decay(processor: hf.ExponentialDecayLengthPenalty, shape: tuple[int, int]) -> RulesAt:
    start, factor, ids = processor.regulation_start, processor.regulation_factor, _ids(processor.eos_token_id)
    return lambda length: (ScoreRule(choice.DECAY, pow(factor, length - start) - 1, ids),) if length > start else ()


CHANGES: dict[type, Maker] = {
    hf.RepetitionPenaltyLogitsProcessor: _penalty,
    hf.EncoderRepetitionPenaltyLogitsProcessor: _penalty_of_prompt,
    hf.SequenceBiasLogitsProcessor: _biases,
    hf.NoBadWordsLogitsProcessor: _biases,
    hf.ExponentialDecayLengthPenalty: _decay,
    hf.NoRepeatNGramLogitsProcessor: lambda p, _: _if(
        lambda length: length >= p.ngram_size, ScoreRule(choice.NGRAM, count=p.ngram_size)
    ),
    hf.MinLengthLogitsProcessor: lambda p, _: _if(
        lambda length: length < p.min_length, ScoreRule(choice.SET_SCORES, -inf, _ids(p.eos_token_id))
    ),
    hf.MinNewTokensLengthLogitsProcessor: lambda p, _: _if(
        lambda length: length - p.prompt_length_to_skip < p.min_new_tokens,
        ScoreRule(choice.SET_SCORES, -inf, _ids(p.eos_token_id)),
    ),
    hf.ForcedBOSTokenLogitsProcessor: lambda p, _: _if(
        lambda length: length == 1, ScoreRule(choice.ONLY_TOKENS, 0.0, _ids([p.bos_token_id]))
    ),
    hf.ForcedEOSTokenLogitsProcessor: lambda p, _: _if(
        lambda length: length == p.max_length - 1, ScoreRule(choice.ONLY_TOKENS, 0.0, _ids(p.eos_token_id))
    ),
    hf.SuppressTokensAtBeginLogitsProcessor: lambda p, _: _if(
        lambda length: length == p.begin_index, ScoreRule(choice.SET_SCORES, -inf, _ids(p.begin_suppress_tokens))
    ),
    hf.SuppressTokensLogitsProcessor: lambda p, _: _always(ScoreRule(choice.SET_SCORES, -inf, _ids(p.suppress_tokens))),
    hf.TemperatureLogitsWarper: lambda p, _: _always(ScoreRule(choice.TEMPERATURE, p.temperature)),
}


def _kept(kind: int, value: str) -> Maker:
    """The maker for a processor that removes tokens, and marks them with -inf."""

    def rules(processor: Any, shape: tuple[int, int]) -> RulesAt | None:
        if processor.filter_value != -inf:
            return None
        return _always(ScoreRule(kind, float(getattr(processor, value)), keep=processor.min_tokens_to_keep))

    return rules


def _top_k(processor: hf.TopKLogitsWarper, shape: tuple[int, int]) -> RulesAt | None:
    return None if processor.filter_value != -inf else _always(ScoreRule(choice.TOP_K, count=processor.top_k))


REMOVALS: dict[type, Maker] = {
    hf.TopKLogitsWarper: _top_k,
    hf.TopPLogitsWarper: _kept(choice.TOP_P, "top_p"),
    hf.MinPLogitsWarper: _kept(choice.MIN_P, "min_p"),
    hf.TypicalLogitsWarper: _kept(choice.TYPICAL, "mass"),
    hf.EpsilonLogitsWarper: _kept(choice.EPSILON, "epsilon"),
    hf.EtaLogitsWarper: _kept(choice.ETA, "epsilon"),
}
KNOWN = CHANGES | REMOVALS
