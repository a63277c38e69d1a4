"""Ends of the texts of a batch: at some tokens, at a length, or where transformers' stopping criteria say so."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field
from functools import cache, cached_property
from time import time
from typing import Protocol

import torch
from torch import Tensor
from transformers import GenerationConfig, StoppingCriteriaList
from transformers.generation import EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria, StopStringCriteria

from labkit.engine.runners.step import ENDS, GOES_ON, STOPS, Ahead
from labkit.kernels.decode_step import TextRules


@dataclass(frozen=True)
class StopText:
    """Stop strings of transformers, which look at a text only if its last token can end one of them.

    can_end: for each token of the vocabulary, and for one beyond it, whether a stop string can end in the token.
    """

    criterion: StopStringCriteria
    can_end: bytes

    @classmethod
    def of(cls, criterion: StopStringCriteria) -> StopText:
        """Reads the criterion's table. Its columns are positions in the stop strings, then numbers of characters that a
        token shares with the end of a stop string, then the token's length.
        """
        shared = criterion.embedding_vec[:, criterion.max_valid_positions * criterion.num_stop_strings : -1]
        return cls(criterion, (shared > 0).any(dim=1).cpu().numpy().tobytes())

    def may_end(self, token: int) -> bool:
        return bool(self.can_end[min(token, len(self.can_end) - 1)])


@dataclass(frozen=True)
class End:
    """End of texts: one of these tokens, a length with the prompt, a stop string, or a time."""

    tokens: frozenset[int]
    length: int
    texts: tuple[StopText, ...] = ()
    times: tuple[MaxTimeCriteria, ...] = ()

    @property
    def pads(self) -> bool:
        """Whether texts that have ended are padded. transformers continues them if no token ends them."""
        return bool(self.tokens)

    @cached_property
    def marks(self) -> Callable[[int], Tensor]:
        """Marks of the tokens of a vocabulary, as `Ahead` describes them."""

        @cache
        def of(vocabulary: int) -> Tensor:
            marks = torch.full((vocabulary,), GOES_ON, dtype=torch.uint8)
            for text in self.texts:
                can_end = torch.tensor([text.may_end(token) for token in range(vocabulary)])
                marks[can_end] = STOPS
            marks[[token for token in self.tokens if token < vocabulary]] = ENDS
            return marks

        return of

    def ahead(
        self,
        ended: Set[int],
        length: int,
        pad: int,
        put: Callable[[Tensor], bool] | None,
        choice: TextRules | None = None,
    ) -> Ahead | None:
        """The steps that may run ahead after a text of `length`, with the prompt; None: each one's time counts."""
        if self.times:
            return None
        return Ahead(self.length - length, self.marks, frozenset(ended), pad if self.pads else None, choice, put)

    def note(self, ended: set[int], last: Sequence[int], tokens: Callable[[], Tensor]) -> None:
        """Adds to `ended` the texts that end with their last tokens. `tokens()` gives all tokens [B, T]."""
        if self.tokens:
            ended.update(row for row, token in enumerate(last) if token in self.tokens)
        for text in self.texts:
            if any(row not in ended and text.may_end(token) for row, token in enumerate(last)):
                ended.update(text.criterion(tokens(), None).nonzero().flatten().tolist())
        if any(time() - limit.initial_timestamp > limit.max_time for limit in self.times):
            ended.update(range(len(last)))


def known_end(criteria: StoppingCriteriaList) -> End | None:
    """Returns the end that the criteria define; None: they have to see each token, because they warn or are the user's
    own code.
    """
    ends, length = set(), None
    texts: list[StopText] = []
    times: list[MaxTimeCriteria] = []
    for criterion in criteria:
        if type(criterion) is EosTokenCriteria:
            ends.update(criterion.eos_token_id.flatten().tolist())
        elif type(criterion) is MaxLengthCriteria:
            most = criterion.max_position_embeddings
            if most is not None and criterion.max_length > most:
                return None
            length = min(criterion.max_length, length or criterion.max_length)
        elif type(criterion) is StopStringCriteria:
            texts.append(StopText.of(criterion))
        elif type(criterion) is MaxTimeCriteria:
            times.append(criterion)
        else:
            return None
    return None if length is None else End(frozenset(ends), length, tuple(texts), tuple(times))


def pad_of(config: GenerationConfig) -> int:
    """Returns the token after the end of a text."""
    return 0 if config._pad_token_tensor is None else int(config._pad_token_tensor)


class Endings(Protocol):
    """Which texts of a batch have ended."""

    def padded(self, next_tokens: Tensor) -> Tensor:
        """The next tokens [B], with padding for texts that have ended."""

    def have_ended(self, tokens: Tensor, scores: tuple[Tensor, ...] | None) -> bool:
        """Whether all texts have ended with the last of `tokens` [B, T]. scores: of each step, if they are kept."""

    def ahead(self, choice: TextRules, put: Callable[[Tensor], bool] | None) -> Ahead | None:
        """The steps that may run ahead, with their tokens chosen by rules and given to `put`; None: the ends of texts
        are not known.
        """


def endings_of(batch: int, criteria: StoppingCriteriaList, config: GenerationConfig, device: torch.device) -> Endings:
    """Returns the endings of new texts. device: of the tokens."""
    end = known_end(criteria)
    if end is not None:
        return _KnownEndings(end, batch, pad_of(config))
    return _AskedEndings(criteria, config._pad_token_tensor, torch.ones(batch, dtype=torch.bool, device=device))


@dataclass
class _KnownEndings:
    """Endings that are known. Few calls of torch look at them: each call costs tens of microseconds after the weights
    have flushed the processor's caches.
    """

    end: End
    batch: int
    pad: int
    ended: set[int] = field(default_factory=set)

    def padded(self, next_tokens: Tensor) -> Tensor:
        for row in self.ended if self.end.pads else ():
            next_tokens[row] = self.pad
        return next_tokens

    def have_ended(self, tokens: Tensor, scores: tuple[Tensor, ...] | None) -> bool:
        self.end.note(self.ended, tokens[:, -1].tolist(), lambda: tokens)
        return len(self.ended) == self.batch or tokens.shape[1] >= self.end.length

    def ahead(self, choice: TextRules, put: Callable[[Tensor], bool] | None) -> Ahead | None:
        return self.end.ahead(self.ended, choice.length, self.pad, put, choice)


@dataclass
class _AskedEndings:
    """Endings by criteria of transformers, or by the user's own code."""

    criteria: StoppingCriteriaList
    pad: Tensor | None
    unfinished: Tensor  # bool [B]

    def padded(self, next_tokens: Tensor) -> Tensor:
        if self.pad is None or not any(isinstance(criterion, EosTokenCriteria) for criterion in self.criteria):
            return next_tokens
        return torch.where(self.unfinished, next_tokens, self.pad)

    def have_ended(self, tokens: Tensor, scores: tuple[Tensor, ...] | None) -> bool:
        self.unfinished &= ~self.criteria(tokens, scores)
        return not bool(self.unfinished.any())

    def ahead(self, choice: TextRules, put: Callable[[Tensor], bool] | None) -> Ahead | None:
        return None
