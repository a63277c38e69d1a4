"""The rows of one call of `generate`, as a runner continues them: all at once, or in parts that know nothing of each
other.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation import EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria, StopStringCriteria
from transformers.generation import logits_process as processing
from transformers.generation.streamers import BaseStreamer

from labkit.engine.hf.decode_loop import decode_loop
from labkit.engine.memory.kv_cache import KVCache
from labkit.engine.runners.driving import Loop

PLAIN = (bool, int, float, str, list, tuple)
BY_TOKEN = (EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria)
BY_ROW = (*BY_TOKEN, StopStringCriteria)
REMEMBERS = (processing.SynthIDTextWatermarkLogitsProcessor,)  # something of each row
CALLS_THE_MODEL = (processing.UnbatchedClassifierFreeGuidanceLogitsProcessor,)
NOT_BY_ROW = (processing.PrefixConstrainedLogitsProcessor, *CALLS_THE_MODEL)
ROWS_IN = {  # attributes with an entry for each row
    processing.RepetitionPenaltyLogitsProcessor: "prompt_ignore_length",
    processing.EncoderRepetitionPenaltyLogitsProcessor: "encoder_input_ids",
    processing.EncoderNoRepeatNGramLogitsProcessor: "generated_ngrams",
}


@dataclass(frozen=True)
class GenerateTexts:
    """What `generate` hands over after its own preparation; see `TextBatch`.

    own_cache: `cache` was made for this call, so that nobody looks at it later. given: a cache of transformers' that
    `cache` was made from, which gets the new keys and values.
    """

    cache: KVCache
    own_cache: bool
    given: Cache | None
    input_ids: Tensor
    processors: LogitsProcessorList
    criteria: StoppingCriteriaList
    config: GenerationConfig
    streamer: BaseStreamer | None
    model_kwargs: dict[str, Any]

    @property
    def rows(self) -> int:
        return len(self.input_ids)

    @property
    def pad(self) -> int:
        pad = self.config._pad_token_tensor
        return 0 if pad is None else int(pad)

    @property
    def wants_tokens_alone(self) -> bool:
        calls = any(isinstance(each, CALLS_THE_MODEL) for each in self.processors)  # which all ranks must do alike
        return not calls and self.streamer is None and self.given is None and not self.config.return_dict_in_generate

    @property
    def asked(self) -> str:
        options = {name: value for name, value in vars(self.config).items() if isinstance(value, PLAIN)}
        by_name = [type(each).__name__ for each in (*self.processors, *self.criteria)]
        return f"{sorted(options.items())} {by_name} {self.wants_tokens_alone}"

    @property
    def together(self) -> str | None:
        if not self.own_cache:
            return "past_key_values were given"
        for each in self.processors:
            if type(each).__module__ != processing.__name__ or isinstance(each, NOT_BY_ROW):
                return f"{type(each).__name__} may look at the whole batch"
        for criterion in self.criteria:
            if type(criterion) not in BY_ROW:
                return f"{type(criterion).__name__} may look at the whole batch"
        return None

    @property
    def ends(self) -> frozenset[int] | None:
        if any(isinstance(each, REMEMBERS) or _rows_in(each) is not None for each in self.processors):
            return None
        if any(type(criterion) not in BY_TOKEN for criterion in self.criteria):
            return None
        found = [each.eos_token_id.flatten().tolist() for each in self.criteria if isinstance(each, EosTokenCriteria)]
        return frozenset(token for tokens in found for token in tokens)

    @property
    def draws(self) -> bool:
        return bool(self.config.do_sample)

    @property
    def longest(self) -> int | None:
        return self.criteria.max_length

    @property
    def tokens(self) -> Tensor:
        return self.input_ids

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
            input_ids=self.input_ids[of_rows].contiguous(),
            processors=self._processors_of(of_rows),
            model_kwargs=kwargs,
        )

    def _processors_of(self, rows: slice) -> LogitsProcessorList:
        """Processors for some of the rows: a processor may remember what it has seen, or know the rows one by one."""
        parts = copy.deepcopy(self.processors)
        for each in parts:
            name = ROWS_IN.get(type(each), "")
            if not isinstance(getattr(each, name, None), Tensor | list):
                continue
            known = _rows_in(each)
            if known is not None:  # with several texts of a prompt, the rows of a prompt stand for all of them
                texts = self.rows // len(known)
                chosen = [row // texts for row in range(rows.start, rows.stop)]
                known = known[chosen] if isinstance(known, Tensor) else [known[row] for row in chosen]
            setattr(each, name, known)
            if isinstance(each, processing.EncoderNoRepeatNGramLogitsProcessor):
                each.batch_size = rows.stop - rows.start
        return parts

    def continued(self, tokens: Tensor) -> GenerateTexts:
        return replace(self, input_ids=tokens, model_kwargs={"attention_mask": torch.ones_like(tokens)})

    def loop(self) -> Loop:
        return decode_loop(
            self.cache,
            self.input_ids,
            self.processors,
            self.criteria,
            self.config,
            self.streamer,
            given=self.given,
            **self.model_kwargs,
        )


def _rows_in(processor: Any) -> Any:
    """What a processor knows of each row; None: nothing, or that no row begins with padding."""
    known = getattr(processor, ROWS_IN.get(type(processor), ""), None)
    if isinstance(processor, processing.RepetitionPenaltyLogitsProcessor):
        return known if isinstance(known, Tensor) and bool(known.any()) else None
    return known
