"""Greedy search and sampling on the fused model: transformers prepares and decides, these loops only request steps.

`generate` calls them after its own preparation, with its logits processors, stopping criteria and configuration.
A loop is a generator: it yields the steps of one batch, and receives the output of each.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation.logits_process import TemperatureLogitsWarper, TopKLogitsWarper

from labkit.engine.hf.endings import End, endings_of, pad_of
from labkit.engine.hf.known_processors import RulesAt, known_rules
from labkit.engine.hf.listener import Listener
from labkit.engine.hf.prompts import read_prompt
from labkit.engine.hf.sorted_removal import processed_scores
from labkit.engine.memory.kv_cache import KVCache
from labkit.engine.runners.long_texts import begun_anew
from labkit.engine.runners.step import StepInput, StepOutput
from labkit.engine.team_size import team_size
from labkit.kernels.build import in_use_already
from labkit.kernels.checks import unchecked
from labkit.kernels.choice import PENALTY_OF_IDS, ScoreRule, choose, draws_like_torch
from labkit.kernels.decode_step import TextRules
from labkit.stages import Phase, Stage, stage
from labkit.system.errors import UserError

RESERVED_AT_ONCE = 4096  # new tokens that the cache makes room for at the start; for more, it grows


def runs_in_decode_loop(config: GenerationConfig, model_kwargs: dict[str, Any]) -> bool:
    """Tells whether these loops support everything that this call of `generate` requests."""
    inspects_layers = config.return_dict_in_generate and (config.output_attentions or config.output_hidden_states)
    return bool(
        config.use_cache
        and not inspects_layers
        and not config.is_assistant
        and config.prefill_chunk_size is None
        and model_kwargs.get("inputs_embeds") is None
    )


@dataclass
class TokenChoice:
    """Choice of the next tokens from logits, with the scores and logits that are kept.

    The kernels choose if they know all processors, and the engine runs C++ or Triton kernels; else transformers' code.
    """

    processors: LogitsProcessorList
    samples: bool
    as_dict: bool
    keeps_scores: bool
    keeps_logits: bool
    scores: list[Tensor]
    raw_logits: list[Tensor]
    rules: RulesAt | None = None  # of all processors, known from the first token on
    tokens: int = 0  # chosen so far

    @classmethod
    def of(cls, config: GenerationConfig, processors: LogitsProcessorList) -> TokenChoice:
        as_dict = bool(config.return_dict_in_generate)
        keeps = (as_dict and bool(config.output_scores), as_dict and bool(config.output_logits))
        return cls(processors, bool(config.do_sample), as_dict, *keeps, [], [])

    @property
    def argmax_is_enough(self) -> bool:
        return not (self.samples or self.processors or self.keeps_scores or self.keeps_logits)

    @property
    def top(self) -> int | None:
        """Number of largest logits that are needed; None: all."""
        return _top_k(self.processors) if self.samples and not (self.keeps_logits or self.keeps_scores) else None

    def ahead(self, tokens: Tensor, length: int) -> TextRules | None:
        """How steps ahead choose tokens after the first `length` of `tokens` [B, T]; None: only `next_tokens` can."""
        if self.rules is None or self.keeps_logits or tokens.dtype != torch.int64:
            return None
        draws = not self.samples or tokens.is_cuda or draws_like_torch()
        return TextRules(tokens, length, self.rules, self.samples) if draws else None

    def next_tokens(self, tokens: Tensor, logits: Tensor) -> Tensor:
        """Returns the next tokens int64 [B], after the `tokens` [B, T] so far, from logits [B, V]."""
        if self.keeps_logits:
            self.raw_logits.append(logits.clone())
        if not self.tokens and not self.keeps_scores:
            self.rules = known_rules(self.processors, (logits.shape[0], logits.shape[1]))
        self.tokens += 1
        if self.rules is not None and logits.device.type == "cpu" and in_use_already():
            chosen = self._by_rules(self.rules(tokens.shape[1]), tokens, logits)
            if chosen is not None:
                return chosen
        processed = processed_scores(self.processors, tokens, logits)
        if self.keeps_scores:
            self.scores.append(processed)
        if not self.samples:
            return processed.argmax(dim=-1)
        return torch.multinomial(torch.softmax(processed, dim=-1), num_samples=1).squeeze(1)

    def _by_rules(self, rules: Sequence[ScoreRule], tokens: Tensor, logits: Tensor) -> Tensor | None:
        """As `next_tokens`; None if the kernel does not choose."""

        def process(sequences: Tensor) -> Tensor:
            return processed_scores(self.processors, tokens[sequences], logits[sequences])

        of_batch = any(rule.kind == PENALTY_OF_IDS for rule in rules)  # such a rule has ids of the whole batch
        return unchecked(choose)(
            logits, tokens, rules, samples=self.samples, threads=team_size(), process=None if of_batch else process
        )


def choose_from_logits(
    prompt: StepInput,
    input_ids: Tensor,
    choice: TokenChoice,
    stopping_criteria: StoppingCriteriaList,
    config: GenerationConfig,
    listener: Listener | None,
    alone: bool,
) -> Generator[StepInput, StepOutput, Tensor]:
    """Chooses tokens from logits, as configured, until the criteria end the texts. alone: see `TextBatch.loop`."""
    (batch, prompt_length), device = input_ids.shape, input_ids.device
    length = prompt_length
    tokens = torch.empty(batch, _limit(stopping_criteria, length), dtype=input_ids.dtype, device=device)
    tokens[:, :length] = input_ids
    endings = endings_of(batch, stopping_criteria, config, device)
    top, cache, phase = choice.top, prompt.cache, prompt.phase
    put = None if listener is None else listener.put_next
    output = yield from read_prompt(prompt._replace(top=top), config.num_return_sequences if alone else 1)
    while True:
        with stage(phase, Stage.SAMPLE):
            have_ended = False
            for _ in range(output.chosen):
                length += 1
                if listener is not None:
                    listener.put(length - prompt_length, tokens[:, length - 1])
                have_ended = endings.have_ended(tokens[:, :length], None)
            if output.result is not None:
                next_tokens = choice.next_tokens(tokens[:, :length], output.result[:, 0].to(device))
                if length == tokens.shape[1]:
                    tokens = torch.cat((tokens, torch.empty_like(tokens)), dim=1)
                tokens[:, length] = next_tokens = endings.padded(next_tokens)
                length += 1
                if listener is not None:
                    listener.put(length - prompt_length, next_tokens)
                scores = tuple(choice.scores) if choice.keeps_scores else None
                have_ended = endings.have_ended(tokens[:, :length], scores)
            if have_ended:
                return tokens[:, :length].clone()
            rules = choice.ahead(tokens, length)
            ahead = None if rules is None else endings.ahead(rules, put)
        phase = Phase.DECODE
        last = tokens[:, length - 1 : length].contiguous()
        step = StepInput(last, cache, top=top, follows=True, ahead=ahead)
        output = yield begun_anew(step, partial(tokens.narrow, 1, 0, length)) if alone else step


def _top_k(processors: LogitsProcessorList) -> int | None:
    """Returns the number k of largest logits that sampling needs, if top-k comes before all other processors except
    temperature; None: it needs all.
    """
    for processor in processors:
        if isinstance(processor, TopKLogitsWarper):
            return processor.top_k
        if not isinstance(processor, TemperatureLogitsWarper):
            return None
    return None


def choose_argmax(
    prompt: StepInput, input_ids: Tensor, end: End, config: GenerationConfig, listener: Listener | None, alone: bool
) -> Generator[StepInput, StepOutput, Tensor]:
    """Chooses the argmax of every step until the end. alone: see `TextBatch.loop`.

    The weights flush the processor's caches in every step, so that each line of code here costs memory accesses: the
    loop does nothing that can be done before it or after it.
    """
    pad, cache, phase = pad_of(config), prompt.cache, prompt.phase
    put = None if listener is None else listener.put_next
    chosen: list[Tensor] = []
    finished: set[int] = set()

    def all_tokens() -> Tensor:
        return torch.cat((input_ids, torch.cat(chosen, dim=1).to(input_ids.device)), dim=1)

    output = yield prompt._replace(greedy=True)
    while True:
        with stage(phase, Stage.SAMPLE):
            assert output.result is not None
            for result in output.result.split(1, dim=1):
                for row in finished if end.pads else ():
                    result[row] = pad
                ids = result.flatten().tolist()
                if min(ids) < 0:
                    raise FloatingPointError(
                        "no logit is a number; the weights or the prompt drive the model out of range"
                    )
                chosen.append(result)
                if listener is not None:
                    listener.put(len(chosen), result[:, 0])
                end.note(finished, ids, all_tokens)
                left = end.length - input_ids.shape[1] - len(chosen)
                if len(finished) == len(ids) or left <= 0:
                    return all_tokens()
            ahead = end.ahead(finished, end.length - left, pad, put)
        phase = Phase.DECODE
        step = StepInput(result, cache, greedy=True, follows=True, ahead=ahead)
        output = yield begun_anew(step, all_tokens) if alone else step


def _limit(criteria: StoppingCriteriaList, length: int) -> int:
    """Returns the longest possible text, prompt included; a guess if the criteria have no limit."""
    return criteria.max_length or length + 256


def prompt_step(
    cache: KVCache,
    input_ids: Tensor,
    criteria: StoppingCriteriaList,
    config: GenerationConfig,
    model_kwargs: dict[str, Any],
    *,
    alone: bool = True,
) -> StepInput:
    """Returns the step for the tokens that are not in the cache yet, and reserves room for later tokens.

    `input_ids` are the whole text or only its new tokens; the mask, which always covers the whole text, tells which.
    alone: see `TextBatch.loop`.
    """
    (batch, length), new = input_ids.shape, input_ids
    mask, positions = model_kwargs.get("attention_mask"), model_kwargs.get("position_ids")
    if cache.length:
        whole = mask.shape[1] if mask is not None else getattr(config, "_mask_length", length)
        count = whole - cache.length if whole == length else length
        if count < 1:
            raise UserError(
                f"the cache holds {cache.length} tokens and the text has {whole}; "
                "give the cached text plus at least one new token"
            )
        new = input_ids[:, -count:]
    to_come = max(0, _limit(criteria, length) - length)
    cache.reserved = max(cache.reserved, cache.length + new.shape[1] + min(to_come, RESERVED_AT_ONCE))
    if positions is not None:
        positions = positions[:, -new.shape[1] :].expand(batch, -1)
    step = StepInput(new, cache, mask, positions)
    return begun_anew(step, lambda: input_ids) if alone else step
