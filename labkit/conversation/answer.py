"""One generated text of a model, passed on while it is generated."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Any, Literal, TypeAlias, cast

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase, TextStreamer

from labkit.engine import InferenceEngine
from labkit.harness.timing import TokenClock
from labkit.kernels.expert_store import ExpertCounts, ExpertStore

Write: TypeAlias = Callable[[str], object]
Ended: TypeAlias = Literal["stop", "length", "interrupted"]


def silent(piece: str) -> None:
    """Ignores a piece of an answer, for callers that read the whole answer."""


@dataclass(frozen=True)
class Answer:
    """An answer of a model, and its speed."""

    prompt_tokens: int
    tokens: tuple[int, ...]  # new tokens, including a stop token
    text: str  # of the tokens, without special tokens and the stop token
    ended: Ended  # by a stop token, by the allowed number of tokens, or by Ctrl-C
    ttft_ms: float | None  # from the call to the first token; None without a first token
    decode_ms: tuple[float, ...]  # of each token after the first, including the time to pass the text on
    experts: ExpertCounts | None = None  # reads of offloaded experts for the tokens after the first; None: of none

    @property
    def context(self) -> int:
        """Tokens from the beginning of the prompt to the end of the answer."""
        return self.prompt_tokens + len(self.tokens)

    @property
    def per_token_ms(self) -> float | None:
        """Mean time of a token after the first; None for fewer than two tokens."""
        return float(np.mean(self.decode_ms)) if self.decode_ms else None

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens per second after the first."""
        return None if self.per_token_ms is None else 1e3 / self.per_token_ms


def speak(
    engine: InferenceEngine,
    tokenizer: PreTrainedTokenizerBase,
    input_ids: Tensor,
    write: Write,
    *,
    new: int,
    stops: Collection[int],
    with_prompt: bool = False,
    **generation: Any,
) -> Answer:
    """Generates at most `new` tokens after `input_ids` [1, T] and calls `write` with each piece of text as it comes.

    - stops: tokens that end the text.
    - with_prompt: whether `write` also gets the prompt, special tokens and the stop token.
    - generation: further arguments of `engine.generate`.

    KeyboardInterrupt ends the generation and is not passed on: the answer is the text so far.
    """
    listener = _Listener(tokenizer, write, stops, with_prompt=with_prompt, store=engine.expert_store)
    ids, interrupted = input_ids.to(engine.device), False
    begun = perf_counter_ns()
    try:
        engine.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new,
            eos_token_id=sorted(stops) or None,
            streamer=listener,
            **generation,
        )
    except KeyboardInterrupt:
        interrupted = True
        listener.end()
    tokens, stamps = listener.tokens, listener.clock.stamps_ns
    stopped = bool(tokens) and tokens[-1] in stops
    return Answer(
        prompt_tokens=ids.shape[1],
        tokens=tuple(tokens),
        text=cast(str, tokenizer.decode(tokens[:-1] if stopped else tokens, skip_special_tokens=True)),
        ended="interrupted" if interrupted else "stop" if stopped else "length",
        ttft_ms=(stamps[0] - begun) / 1e6 if stamps else None,
        decode_ms=tuple((np.diff(stamps) / 1e6).tolist()),
        experts=listener.expert_reads(),
    )


def stop_tokens(engine: InferenceEngine, tokenizer: PreTrainedTokenizerBase | None = None) -> set[int]:
    """Stop tokens from the model's generation config, and with a tokenizer also its end-of-text token."""
    of_model = engine.generation_config.eos_token_id
    stops = set() if of_model is None else {of_model} if isinstance(of_model, int) else set(of_model)
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        stops.add(tokenizer.eos_token_id)
    return stops


class _Listener(TextStreamer):
    """Records each new token and its time, and passes text on in whole words. It leaves out stop tokens itself, because
    the tokenizer may not list them as special: some are named by the chat template alone.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        write: Write,
        stops: Collection[int],
        *,
        with_prompt: bool,
        store: ExpertStore | None,
    ) -> None:
        super().__init__(tokenizer, skip_prompt=not with_prompt, skip_special_tokens=not with_prompt)
        self._unwritten = () if with_prompt else stops
        self.tokens: list[int] = []
        self.clock = TokenClock()
        self._write = write
        self._store, self._before = store, None if store is None else store.counts

    def expert_reads(self) -> ExpertCounts | None:
        """Reads of offloaded experts since the first token; None: all experts are resident."""
        return None if self._store is None or self._before is None else self._store.counts.since(self._before)

    def put(self, value: Tensor) -> None:
        self.clock.put(value)
        if value.ndim < 2:  # the prompt comes first, in 2-D
            if self._store is not None and not self.tokens:
                self._before = self._store.counts
            self.tokens += value.tolist()
            if self.tokens[-1] in self._unwritten:
                return
        super().put(value)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        if text:
            self._write(text)
