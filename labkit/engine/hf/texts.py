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
NOT_BY_ROW = (processing.PrefixConstrainedLogitsProcessor, processing.UnbatchedClassifierFreeGuidanceLogitsProcessor)


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
        return self.streamer is None and self.given is None and not self.config.return_dict_in_generate

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
        if any(isinstance(each, REMEMBERS) for each in self.processors):
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
            processors=copy.deepcopy(self.processors),  # some remember what they have seen
            model_kwargs=kwargs,
        )

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
