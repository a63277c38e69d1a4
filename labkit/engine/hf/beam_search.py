"""Beam search on the fused model, with the results of transformers' own search for the same logits.

Shapes: B texts, n beams of each, K candidates for the next beams, V vocabulary, T tokens at most with the prompt of P.

The weights flush the processor's caches in every step, so the state is in small NumPy arrays, on which an operation is
cheaper than in torch.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList
from transformers.generation import GenerateBeamDecoderOnlyOutput

from labkit.engine.hf.endings import End
from labkit.engine.hf.known_processors import RulesAt, known_rules
from labkit.engine.hf.prompts import read_prompt
from labkit.engine.memory.kv_cache import KVCache
from labkit.engine.runners.long_texts import begun_anew
from labkit.engine.runners.step import StepInput, StepOutput
from labkit.engine.team_size import team_size
from labkit.kernels.build import in_use_already
from labkit.kernels.choice import TOP_K
from labkit.kernels.choice.continuations import continue_beams
from labkit.stages import Phase, Stage, stage

NONE = np.float32(-1e9)  # added to the scores of beams that must not be chosen; transformers adds the same number

BeamLoop = Generator[StepInput, StepOutput, "Tensor | GenerateBeamDecoderOnlyOutput"]


def runs_in_beam_loop(config: GenerationConfig) -> bool:
    """Whether `beam_loop` does what this configuration requests, for a call that `runs_in_decode_loop`."""
    keeps = config.return_dict_in_generate and (config.output_scores or config.output_logits)
    return not config.do_sample and not keeps


def beam_loop(
    prompt: StepInput, input_ids: Tensor, processors: LogitsProcessorList, end: End, config: GenerationConfig
) -> BeamLoop:
    """Continues `input_ids` [B * n, P], in which each text has n equal rows, until no beam can become better.

    prompt: the step of all rows.
    """
    search, cache = _Search(input_ids, processors, end, config), prompt.cache
    phase, output = prompt.phase, (yield from read_prompt(prompt, config.num_beams))
    while True:
        assert output.result is not None
        with stage(phase, Stage.SAMPLE):
            tokens = search.advance(output.result[:, 0])
            if (order := search.order) is not None:
                cache.reorder_cache(order)
            if tokens is None:
                return search.result(cache)
        phase = Phase.DECODE
        output = yield begun_anew(StepInput(tokens, cache, follows=True), search.texts)


@dataclass
class _Beams:
    """Hypotheses of each text.

    tokens: int64 [B, n, T], the prompt first.
    scores: float32 [B, n].
    sources: int32 [B, n, T - P], the beam that each new token continues, counted over all texts; -1: no token.
    """

    tokens: np.ndarray
    scores: np.ndarray
    sources: np.ndarray

    def chosen(self, among: np.ndarray) -> _Beams:
        """The hypotheses with the indices `among` [B, k]."""
        texts = np.arange(len(among))[:, None]
        return _Beams(self.tokens[texts, among], self.scores[texts, among], self.sources[texts, among])

    def joined(self, others: _Beams) -> _Beams:
        pairs = zip(vars(self).values(), vars(others).values(), strict=True)
        return _Beams(*(np.concatenate(pair, axis=1) for pair in pairs))


class _Search:
    """State of the search. Scores are computed as transformers computes them, operation by operation in float32."""

    def __init__(self, input_ids: Tensor, processors: LogitsProcessorList, end: End, config: GenerationConfig) -> None:
        (rows, prompt), most, beams = input_ids.shape, config.max_length, config.num_beams
        self.processors, self.end, self.config = processors, end, config
        self.rules: RulesAt | None = None  # of all processors, known from the first step on
        self.length = self.prompt = prompt  # of the running beams, and P
        shape = (rows // beams, beams)
        pad, ends = config._pad_token_tensor, config._eos_token_tensor
        self.count = max(2, 1 + (0 if ends is None else len(ends))) * beams  # K
        tokens = np.full((*shape, most), -1 if ends is None else int(pad or ends[0]), dtype=np.int64)
        tokens[:, :, :prompt] = input_ids.view(*shape, prompt).numpy()
        sources = np.full((*shape, most - prompt), -1, dtype=np.int32)
        self.running = _Beams(tokens, np.zeros(shape, dtype=np.float32), sources)
        self.running.scores[:, 1:] = NONE  # beams of one text begin as equals: only the first is continued
        self.complete = _Beams(tokens.copy(), np.full(shape, NONE), sources.copy())
        self.is_complete = np.zeros(shape, dtype=bool)
        self.may_improve = np.ones(shape[0], dtype=bool)  # whether a running beam may become better than complete ones

    @property
    def order(self) -> Tensor | None:
        """For each row the row that it continues, int32 [B * n]; None: each one continues itself."""
        sources = self.running.sources[:, :, self.length - 1 - self.prompt].flatten()
        return None if (sources == np.arange(len(sources))).all() else torch.from_numpy(sources)

    def texts(self) -> Tensor:
        """The running beams, int64 [B * n, length]."""
        return torch.from_numpy(self.running.tokens[:, :, : self.length].reshape(-1, self.length))

    def advance(self, logits: Tensor) -> Tensor | None:
        """Chooses the next running beams from logits [B * n, V]. Returns their last tokens [B * n, 1]; None: no beam
        can become better.
        """
        beams, scores, places = self.config.num_beams, *self._best_sums(torch.log_softmax(logits, dim=-1))
        sources, tokens = np.divmod(places, logits.shape[1])
        candidates = self._candidates(sources, tokens, scores)
        ends = self._ended(tokens, candidates)
        with_ends = scores + ends.astype(np.float32) * NONE
        best = _largest(with_ends, beams)
        self._complete_with(candidates, ends)
        self.running = _Beams(candidates.tokens, with_ends, candidates.sources).chosen(best)
        self.length += 1
        self.may_improve &= self._may_improve()
        stops_early = self.config.early_stopping is True and self.is_complete.all()
        if ends.all() or stops_early or not self.may_improve.any():
            return None
        return torch.from_numpy(self.running.tokens[:, :, self.length - 1].flatten()[:, None])

    def _best_sums(self, log_probs: Tensor) -> tuple[np.ndarray, np.ndarray]:
        """The K largest sums of a score and a log probability for each text [B, K], and their places beam * V + token.
        The kernel finds them if it knows all processors, and no two are equal; else transformers' code and torch.
        """
        if self.length == self.prompt and in_use_already():
            rules = known_rules(self.processors, (log_probs.shape[0], log_probs.shape[1]))
            self.rules = rules if rules and all(rule.kind < TOP_K for rule in rules(self.length)) else None
        scores, tokens = torch.from_numpy(self.running.scores), torch.from_numpy(self.running.tokens)
        if self.rules is not None and self.count <= log_probs.shape[1]:
            rules_here = self.rules(self.length)
            found = continue_beams(
                log_probs, scores, tokens, self.length, rules_here, count=self.count, threads=team_size()
            )
            if found is not None:
                return found[0].numpy(), found[1].numpy()
        if self.processors:
            log_probs = self.processors(tokens[:, :, : self.length].flatten(0, 1), log_probs)
        sums = log_probs.view(*scores.shape, -1) + scores[:, :, None]
        best, places = torch.topk(sums.view(len(scores), -1), k=self.count)
        return best.numpy(), places.numpy()

    def _candidates(self, sources: np.ndarray, tokens: np.ndarray, scores: np.ndarray) -> _Beams:
        """The beams with the indices `sources` [B, K], each continued by a token."""
        candidates, (texts, beams) = self.running.chosen(sources), self.is_complete.shape
        candidates.tokens[:, :, self.length] = tokens
        candidates.sources[:, :, self.length - self.prompt] = sources + np.arange(texts)[:, None] * beams
        candidates.scores = scores
        return candidates

    def _ended(self, tokens: np.ndarray, candidates: _Beams) -> np.ndarray:
        """Which candidates end with their last token, bool [B, K]."""
        length, ended = self.length + 1, np.zeros(tokens.size, dtype=bool)
        if length >= self.end.length:
            ended[:] = True
        else:
            rows: set[int] = set()
            self.end.note(
                rows,
                tokens.reshape(-1).tolist(),
                lambda: torch.from_numpy(candidates.tokens[:, :, :length].reshape(-1, length)),
            )
            ended[list(rows)] = True
        return ended.reshape(tokens.shape)

    def _complete_with(self, candidates: _Beams, ends: np.ndarray) -> None:
        """Adds the n best candidates to the complete beams, if they end; the n best of all stay."""
        beams, config = self.config.num_beams, self.config
        new = ends.copy()
        new[:, beams:] = False  # the other candidates only make sure that n beams remain
        if not new.any():
            return
        scores = _divided(candidates.scores, (self.length + 1 - self.prompt) ** config.length_penalty)
        full = self.is_complete.all(axis=1, keepdims=True) & (config.early_stopping is True)
        for barred in (full, ~self.may_improve[:, None], ~new):
            scores = scores + barred.astype(np.float32) * NONE
        merged = self.complete.joined(_Beams(candidates.tokens, scores, candidates.sources))
        best = _largest(merged.scores, beams)
        self.complete = merged.chosen(best)
        self.is_complete = np.take_along_axis(np.concatenate((self.is_complete, new), axis=1), best, axis=1)

    def _may_improve(self) -> np.ndarray:
        """Whether the best running beam of a text may become better than its worst complete one, bool [B]."""
        config, new = self.config, self.length - self.prompt
        if config.early_stopping == "never" and config.length_penalty > 0:
            new = config.max_length - self.prompt
        best = _divided(self.running.scores[:, :1], new**config.length_penalty)
        worst = np.where(self.is_complete, self.complete.scores.min(axis=1, keepdims=True), NONE)
        improves: np.ndarray = np.any(best > worst, axis=1)
        return improves

    def result(self, cache: KVCache) -> Tensor | GenerateBeamDecoderOnlyOutput:
        """Returns the result of `generate`: the best complete beams of each text."""
        count, most = self.config.num_return_sequences, self.complete.tokens.shape[2]
        tokens = torch.from_numpy(self.complete.tokens[:, :count].reshape(-1, most))
        sources = torch.from_numpy(self.complete.sources[:, :count].reshape(-1, most - self.prompt))
        new = int((sources >= 0).sum(dim=1).max())
        tokens, sources = tokens[:, : self.prompt + new], sources[:, :new]
        if not self.config.return_dict_in_generate:
            return tokens
        return GenerateBeamDecoderOnlyOutput(sequences=tokens, beam_indices=sources, past_key_values=cache)


def _divided(scores: np.ndarray, by: float) -> np.ndarray:
    return scores / np.float32(by)


def _largest(scores: np.ndarray, count: int) -> np.ndarray:
    """The indices of the largest scores of each text [B, count], the largest first, in torch's order of equal ones."""
    return torch.topk(torch.from_numpy(scores), k=count)[1].numpy()
