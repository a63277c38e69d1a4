"""A conversation with a chat model. Each turn reads only the new tokens, if the model has a row."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import Any

from transformers import PreTrainedTokenizerBase

from labkit.conversation.answer import Answer, Write, silent, speak, stop_tokens
from labkit.engine import InferenceEngine
from labkit.engine.engine import DecoderEngine, InjectedEngine
from labkit.engine.memory.kv_cache import KVCache
from labkit.models.chat_template import Message, check_chat_template, end_of_turn, render
from labkit.system.bounds import check_numbers
from labkit.system.errors import UserError, UserTypeError


class ContextFullError(UserError):
    """The conversation leaves no position for an answer."""


class Conversation:
    """Messages of a user and answers of a model. Their keys and values stay in a cache from turn to turn."""

    messages: list[Message]  # in the form that the chat template takes
    context: int  # tokens so far, including the latest answer
    _cache: KVCache | None  # None: a model with hooks reads the whole conversation at each turn
    _cached: list[int]  # the tokens in the cache

    def __init__(
        self,
        engine: InferenceEngine,
        tokenizer: PreTrainedTokenizerBase,
        *,
        system: str | None = None,
        new: int,
        **generation: Any,
    ) -> None:
        """Starts a conversation.

        - engine: a decoder on the fused kernels, or a model with hooks.
        - system: the system prompt.
        - new: most tokens of an answer.
        - generation: further arguments of `engine.generate`, such as `do_sample=True, temperature=0.7`.

        Raises UserError for a tokenizer without a chat template, and for less than one new token; UserTypeError for
        another engine.
        """
        check_chat_template(tokenizer)
        check_numbers(new=new, temperature=generation.get("temperature"))
        if not isinstance(engine, DecoderEngine | InjectedEngine):
            raise UserTypeError(
                f"got {type(engine).__name__}, which has no KV cache of labkit's; expected an engine from "
                "init_inference for a decoder with kernels"
            )
        self._engine, self._tokenizer = engine, tokenizer
        self._system, self._new, self._generation = system, new, generation
        self._stops = stop_tokens(engine, tokenizer)
        if (end := end_of_turn(tokenizer)) is not None:
            self._stops.add(end)
        self.start_over()

    @property
    def positions(self) -> int | None:
        """Most tokens of the context; None if the model sets no limit."""
        engine = self._engine
        if isinstance(engine, DecoderEngine):
            return engine.model_config.max_positions
        return getattr(engine.config.get_text_config(), "max_position_embeddings", None)

    def start_over(self) -> None:
        """Forgets all messages except the system prompt."""
        self.messages = []
        if self._system is not None:
            self.messages.append({"role": "system", "content": self._system})
        self.context = 0
        self._forget()

    def say(self, text: str, write: Write = silent) -> Answer:
        """Returns the model's answer to a message, and passes it to `write` piece by piece as it is generated.

        The answer ends when no positions are left. After Ctrl-C the answer so far stays in the conversation.

        Raises ContextFullError if no position is left for an answer, and UserError if the chat template refuses the
        conversation. The conversation then stays unchanged.
        """
        messages = [*self.messages, {"role": "user", "content": text}]
        input_ids = render(self._tokenizer, messages)
        ids = input_ids[0].tolist()
        new = self._room(len(ids))
        cache = self._cache_before(ids)
        before = {} if cache is None else {"past_key_values": cache}
        self._forget()  # the content of the cache after a failed answer is unknown
        answer = speak(
            self._engine,
            self._tokenizer,
            input_ids,
            write,
            new=new,
            stops=self._stops,
            **before,
            **self._generation,
        )
        if cache is not None and answer.ended != "interrupted":
            self._cache, self._cached = cache, [*ids, *answer.tokens][: cache.length]
        self.messages = [*messages, {"role": "assistant", "content": answer.text}]
        self.context = answer.context
        return answer

    def _room(self, tokens: int) -> int:
        """Number of new tokens allowed after `tokens` tokens. Raises ContextFullError if no position is left."""
        if self.positions is None:
            return self._new
        if tokens >= self.positions:
            raise ContextFullError(
                f"with this message the conversation has {tokens} tokens, and the model {self.positions} positions; "
                "begin a new conversation, or shorten the message"
            )
        return min(self._new, self.positions - tokens)

    def _cache_before(self, ids: Sequence[int]) -> KVCache | None:
        """The cache, cropped to the beginning that it shares with `ids`. At least one token of `ids` is left to read.

        The template may render earlier turns differently than they were generated: tokenizing an answer's text need not
        give the tokens that the model chose, and some templates leave out parts of earlier answers.
        """
        if self._cache is None:
            return None
        same = takewhile(lambda pair: pair[0] == pair[1], zip(self._cached, ids[:-1], strict=False))
        common = sum(1 for _ in same)
        self._cache.crop(common - len(self._cached))
        return self._cache

    def _forget(self) -> None:
        self._cache = self._engine.new_cache() if isinstance(self._engine, DecoderEngine) else None
        self._cached = []
