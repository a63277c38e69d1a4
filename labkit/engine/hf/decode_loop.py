"""Greedy search and sampling on the fused model: transformers prepares and decides, this loop only runs the steps.

`generate` hands over here after its own preparation, with its logits processors, stopping criteria and configuration.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation import EosTokenCriteria, GenerateDecoderOnlyOutput, MaxLengthCriteria
from transformers.generation.logits_process import TemperatureLogitsWarper, TopKLogitsWarper
from transformers.generation.streamers import BaseStreamer

from labkit.engine.memory.kv_cache import KVCache
from labkit.stages import Phase, Stage, StepRanges, phase_of, stage
from labkit.system.errors import UserError

if TYPE_CHECKING:
    from labkit.engine.hf.causal_lm import FusedCausalLM

RESERVED_AT_ONCE = 4096  # new tokens that the cache makes room for at the start; beyond, it grows


def runs_in_decode_loop(config: GenerationConfig, model_kwargs: dict[str, Any]) -> bool:
    """Whether `decode_loop` does all that this call of `generate` asks for."""
    inspects_layers = config.return_dict_in_generate and (config.output_attentions or config.output_hidden_states)
    return bool(
        config.use_cache
        and not inspects_layers
        and not config.is_assistant
        and config.prefill_chunk_size is None
        and model_kwargs.get("inputs_embeds") is None
    )


def decode_loop(
    model: "FusedCausalLM",
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    streamer: BaseStreamer | None = None,
    **model_kwargs: Any,
) -> Tensor | GenerateDecoderOnlyOutput:
    """What transformers' `_sample` returns for the same arguments, token for token on equal logits.

    Tokens are kept and chosen where `input_ids` are; the model may be on another device.
    """
    batch, length = input_ids.shape
    pad, sample = generation_config._pad_token_tensor, bool(generation_config.do_sample)
    as_dict = bool(generation_config.return_dict_in_generate)
    keep_scores, keep_logits = as_dict and generation_config.output_scores, as_dict and generation_config.output_logits
    has_eos = any(isinstance(criterion, EosTokenCriteria) for criterion in stopping_criteria)
    argmax_is_enough = not (sample or logits_processor or keep_scores or keep_logits)

    cache, new = _cache_and_prompt(model, input_ids, generation_config, model_kwargs)
    limit = stopping_criteria.max_length or length + 256
    cache.reserved = max(cache.reserved, cache.length + new.shape[1] + min(max(0, limit - length), RESERVED_AT_ONCE))
    mask, positions = model_kwargs.get("attention_mask"), model_kwargs.get("position_ids")
    if positions is not None:
        positions = positions[:, -new.shape[1] :].expand(batch, -1)

    scores: list[Tensor] = []
    raw_logits: list[Tensor] = []
    phase = phase_of(cache.length, new.shape[1])
    with StepRanges() as steps:
        if argmax_is_enough and (end := _known_end(stopping_criteria)) is not None:
            padding = 0 if pad is None else int(pad)
            sequences = _greedy(model, cache, new, mask, positions, input_ids, end, padding, streamer, steps, phase)
        else:
            tokens = torch.empty(batch, limit, dtype=input_ids.dtype, device=input_ids.device)
            tokens[:, :length] = input_ids
            unfinished = torch.ones(batch, dtype=torch.bool, device=input_ids.device)
            steps.begin(phase)
            top = _enough(logits_processor) if sample and not (keep_logits or keep_scores) else None
            result = model.run(new, cache, mask, positions, keep=1, top=top)
            while True:
                with stage(phase, Stage.SAMPLE):
                    logits = result[:, 0].to(input_ids.device)
                    if keep_logits:
                        raw_logits.append(logits.clone())
                    processed = logits_processor(tokens[:, :length], logits)
                    if keep_scores:
                        scores.append(processed)
                    next_tokens = _sampled(processed) if sample else processed.argmax(dim=-1)
                    if has_eos:
                        next_tokens = torch.where(unfinished, next_tokens, pad)
                    if length == tokens.shape[1]:
                        tokens = torch.cat((tokens, torch.empty_like(tokens)), dim=1)
                    tokens[:, length] = next_tokens
                    length += 1
                    if streamer is not None:
                        streamer.put(next_tokens.cpu())
                    unfinished &= ~stopping_criteria(tokens[:, :length], tuple(scores) if keep_scores else None)
                    if not bool(unfinished.any()):
                        break
                phase = Phase.DECODE
                steps.begin(phase)
                result = model.advance(next_tokens[:, None].contiguous(), cache, greedy=False, top=top)
            sequences = tokens[:, :length].clone()
    if streamer is not None:
        streamer.end()
    given = model_kwargs.get("past_key_values")
    if given is not None and given is not cache:
        cache.hand_back(given)
    if not as_dict:
        return sequences
    return GenerateDecoderOnlyOutput(
        sequences=sequences,
        scores=tuple(scores) if keep_scores else None,
        logits=tuple(raw_logits) if keep_logits else None,
        past_key_values=cache,
    )


@dataclass(frozen=True)
class _End:
    """Where greedy search ends: at one of these tokens, or at a length, prompt included."""

    tokens: frozenset[int]
    length: int


def _known_end(criteria: StoppingCriteriaList) -> _End | None:
    """What the criteria come to, where they need not look at each token: no warning to give, no code of the user's."""
    ends, length = set(), None
    for criterion in criteria:
        if type(criterion) is EosTokenCriteria:
            ends.update(criterion.eos_token_id.flatten().tolist())
        elif type(criterion) is MaxLengthCriteria:
            most = criterion.max_position_embeddings
            if most is not None and criterion.max_length > most:
                return None
            length = min(criterion.max_length, length or criterion.max_length)
        else:
            return None
    return None if length is None else _End(frozenset(ends), length)


def _enough(processors: LogitsProcessorList) -> int | None:
    """How many of the largest logits sampling needs: k where all but the k largest are dropped before anything else."""
    for processor in processors:
        if isinstance(processor, TopKLogitsWarper):
            return processor.top_k
        if not isinstance(processor, TemperatureLogitsWarper):
            return None
    return None


def _greedy(
    model: "FusedCausalLM",
    cache: KVCache,
    new: Tensor,
    mask: Tensor | None,
    positions: Tensor | None,
    input_ids: Tensor,
    end: _End,
    pad: int,
    streamer: BaseStreamer | None,
    steps: StepRanges,
    phase: Phase,
) -> Tensor:
    """The argmax of every step until the end. Between two steps weights have swept the caches clean, so that each line
    of code costs memory accesses: the loop does nothing that can be done before or after.
    """
    chosen: list[Tensor] = []
    finished: set[int] = set()
    steps.begin(phase)
    result = model.run(new, cache, mask, positions, keep=1, greedy=True)
    while True:
        with stage(phase, Stage.SAMPLE):
            for row in finished:
                result[row] = pad
            ids = result.flatten().tolist()
            if min(ids) < 0:
                raise FloatingPointError("no logit is a number; the weights or the prompt drive the model out of range")
            chosen.append(result)
            if streamer is not None:
                streamer.put(result[:, 0].cpu())
            if end.tokens:
                finished.update(row for row, token in enumerate(ids) if token in end.tokens)
            if len(finished) == len(ids) or input_ids.shape[1] + len(chosen) >= end.length:
                break
        phase = Phase.DECODE
        steps.begin(phase)
        result = model.advance(result, cache, greedy=True)
    return torch.cat((input_ids, torch.cat(chosen, dim=1).to(input_ids.device)), dim=1)


def _sampled(scores: Tensor) -> Tensor:
    return torch.multinomial(torch.softmax(scores, dim=-1), num_samples=1).squeeze(1)


def _cache_and_prompt(
    model: "FusedCausalLM", input_ids: Tensor, generation_config: GenerationConfig, model_kwargs: dict[str, Any]
) -> tuple[KVCache, Tensor]:
    """The cache to go on with, and the tokens that it does not hold yet.

    `input_ids` are the whole text or only what is new; the mask, which always covers the whole text, tells which.
    """
    mask = model_kwargs.get("attention_mask")
    cache = model.own_cache(model_kwargs.get("past_key_values"), mask)
    if cache.length == 0:
        return cache, input_ids
    whole = mask.shape[1] if mask is not None else getattr(generation_config, "_mask_length", input_ids.shape[1])
    new = whole - cache.length if whole == input_ids.shape[1] else input_ids.shape[1]
    if new < 1:
        raise UserError(
            f"the cache holds {cache.length} tokens and the text has {whole}; "
            "give the cached text plus at least one new token"
        )
    return cache, input_ids[:, -new:]
