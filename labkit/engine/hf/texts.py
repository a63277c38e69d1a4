"""The rows of one call of `generate`. A runner continues them all at once, or in independent parts."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation import (
    EosTokenCriteria,
    GenerateDecoderOnlyOutput,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StopStringCriteria,
)
from transformers.generation import logits_process as processing
from transformers.generation.streamers import BaseStreamer

from labkit.engine.hf.decode_loop import TokenChoice, choose_argmax, choose_from_logits, prompt_step
from labkit.engine.hf.endings import known_end, pad_of
from labkit.engine.hf.listener import Listener
from labkit.engine.memory.adoption import hand_back
from labkit.engine.memory.kv_cache import KVCache
from labkit.engine.runners.driving import Loop

PLAIN = (bool, int, float, str, list, tuple)
# classes of stopping criteria
BY_TOKEN = (EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria)  # end a row at an end token, or all rows at once
BY_ROW = (*BY_TOKEN, StopStringCriteria)  # judge each row without the others
# classes of logits processors
REMEMBERS = (processing.SynthIDTextWatermarkLogitsProcessor,)  # keep a state of each row
CALLS_THE_MODEL = (processing.UnbatchedClassifierFreeGuidanceLogitsProcessor,)
NOT_BY_ROW = (processing.PrefixConstrainedLogitsProcessor, *CALLS_THE_MODEL)  # see the whole batch
ROWS_IN = {  # attributes with one entry per row
    processing.RepetitionPenaltyLogitsProcessor: "prompt_ignore_length",
    processing.EncoderRepetitionPenaltyLogitsProcessor: "encoder_input_ids",
    processing.EncoderNoRepeatNGramLogitsProcessor: "generated_ngrams",
}


@dataclass(frozen=True)
class GenerateTexts:
    """Arguments of `generate` after its own preparation; see `TextBatch`.

    own_cache: `cache` was made for this call, so that nobody reads it later.
    hf_cache: transformers' cache from which `cache` was made; it gets the new keys and values.
    """

    cache: KVCache
    own_cache: bool
    hf_cache: Cache | None
    tokens: Tensor
    processors: LogitsProcessorList
    criteria: StoppingCriteriaList
    config: GenerationConfig
    streamer: BaseStreamer | None
    model_kwargs: dict[str, Any]

    @property
    def rows(self) -> int:
        return len(self.tokens)

    @property
    def pad(self) -> int:
        return pad_of(self.config)

    @property
    def wants_tokens_alone(self) -> bool:
        # all ranks must make the calls of these processors
        calls = any(isinstance(processor, CALLS_THE_MODEL) for processor in self.processors)
        alone = self.streamer is None and self.hf_cache is None and not self.config.return_dict_in_generate
        return alone and not calls and not self._may_be_long

    @property
    def _may_be_long(self) -> bool:
        """Whether a text may need the rotation for long texts. It chooses the rotation of all rows, and begins anew."""
        short, positions = self.cache.config.short_positions, self.model_kwargs.get("position_ids")
        if short is None or self.longest is None:
            return short is not None
        width = self.tokens.shape[1]
        return max(width, 0 if positions is None else int(positions.max()) + 1) + self.longest - width > short

    @property
    def asked(self) -> str:
        options = {name: value for name, value in vars(self.config).items() if isinstance(value, PLAIN)}
        names = [type(part).__name__ for part in (*self.processors, *self.criteria)]
        return f"{sorted(options.items())} {names} {self.wants_tokens_alone}"

    @property
    def together(self) -> str | None:
        if not self.own_cache:
            return "past_key_values were given"
        for processor in self.processors:
            if type(processor).__module__ != processing.__name__ or isinstance(processor, NOT_BY_ROW):
                return f"{type(processor).__name__} may look at the whole batch"
        for criterion in self.criteria:
            if type(criterion) not in BY_ROW:
                return f"{type(criterion).__name__} may look at the whole batch"
        return None

    @property
    def ends(self) -> frozenset[int] | None:
        if any(isinstance(processor, REMEMBERS) or _rows_in(processor) is not None for processor in self.processors):
            return None
        if any(type(criterion) not in BY_TOKEN for criterion in self.criteria):
            return None
        return frozenset(
            token
            for criterion in self.criteria
            if isinstance(criterion, EosTokenCriteria)
            for token in criterion.eos_token_id.flatten().tolist()
        )

    @property
    def draws(self) -> bool:
        return bool(self.config.do_sample)

    @property
    def longest(self) -> int | None:
        return self.criteria.max_length

    def part(self, rows: range, cache: KVCache) -> GenerateTexts:
        of_rows = slice(rows.start, rows.stop)
        kwargs = dict(self.model_kwargs)
        for name in ("attention_mask", "position_ids"):
            tensor = kwargs.get(name)
            if tensor is not None and len(tensor) == self.rows:
                kwargs[name] = tensor[of_rows].contiguous()
        return replace(
            self,
            cache=cache,
            tokens=self.tokens[of_rows].contiguous(),
            processors=self._processors_of(of_rows),
            model_kwargs=kwargs,
        )

    def _processors_of(self, rows: slice) -> LogitsProcessorList:
        """Returns copies of the processors for some of the rows: a processor may have a state, or entries for rows."""
        parts = copy.deepcopy(self.processors)
        for processor in parts:
            name = ROWS_IN.get(type(processor), "")
            if not isinstance(getattr(processor, name, None), Tensor | list):
                continue
            entries = _rows_in(processor)
            if entries is not None:  # with several texts per prompt, there is one entry per prompt
                texts = self.rows // len(entries)
                chosen = [row // texts for row in range(rows.start, rows.stop)]
                entries = entries[chosen] if isinstance(entries, Tensor) else [entries[row] for row in chosen]
            setattr(processor, name, entries)
            if isinstance(processor, processing.EncoderNoRepeatNGramLogitsProcessor):
                processor.batch_size = rows.stop - rows.start
        return parts

    def continued(self, tokens: Tensor) -> GenerateTexts:
        return replace(self, tokens=tokens, model_kwargs={"attention_mask": torch.ones_like(tokens)})

    def loop(self, *, alone: bool = False) -> Loop:
        """Returns the result of transformers' `_sample` for the same arguments, token for token on equal logits.

        Tokens are kept and chosen on the device of `tokens`; the model may be on another device.
        """
        began_long = self.cache.long_text if self.cache.length else None
        prompt = prompt_step(self.cache, self.tokens, self.criteria, self.config, self.model_kwargs, alone=alone)
        choice = TokenChoice.of(self.config, self.processors)
        end = known_end(self.criteria) if choice.argmax_is_enough else None
        listener = None if self.streamer is None else Listener(self.streamer)
        if end is not None:
            sequences = yield from choose_argmax(prompt, self.tokens, end, self.config, listener, alone)
        else:
            sequences = yield from choose_from_logits(
                prompt, self.tokens, choice, self.criteria, self.config, listener, alone
            )
        if self.streamer is not None:
            self.streamer.end()
        if self.hf_cache is not None and began_long in (None, self.cache.long_text):  # else its tokens stay valid
            hand_back(self.cache, self.hf_cache)
        if not choice.as_dict:
            return sequences
        return GenerateDecoderOnlyOutput(
            sequences=sequences,
            scores=tuple(choice.scores) if choice.keeps_scores else None,
            logits=tuple(choice.raw_logits) if choice.keeps_logits else None,
            past_key_values=self.cache,
        )


def _rows_in(processor: Any) -> Any:
    """Returns a processor's entries for each row; None: it has none, or they say that no row has left padding."""
    entries = getattr(processor, ROWS_IN.get(type(processor), ""), None)
    if isinstance(processor, processing.RepetitionPenaltyLogitsProcessor):
        return entries if isinstance(entries, Tensor) and bool(entries.any()) else None
    return entries
