"""A conversation with a chat model, of which each turn reads only what is new."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import Any

from transformers import PreTrainedTokenizerBase

from labkit.conversation.answer import Answer, Write, silent, speak, stop_tokens
from labkit.engine import InferenceEngine
from labkit.engine.memory.kv_cache import KVCache
from labkit.models.chat_template import Message, check_chat_template, end_of_turn, render
from labkit.system.bounds import check_numbers
from labkit.system.errors import UserError, UserTypeError


class ContextFullError(UserError):
    """The conversation leaves no position for an answer."""


class Conversation:
    """Messages of a user and answers of a model, whose keys and values stay in a cache from turn to turn.

    messages: what was said, as the chat template takes it. context: tokens of it so far, the latest answer included.
    """

    messages: list[Message]
    context: int
    _cache: KVCache
    _held: list[int]  # the tokens that the cache holds

    def __init__(
        self,
        engine: InferenceEngine,
        tokenizer: PreTrainedTokenizerBase,
        *,
        system: str | None = None,
        new: int,
        **generation: Any,
    ) -> None:
        """engine: a decoder on the fused kernels. system: what the model is told before the first message. new: tokens
        of an answer at most. generation: what else `engine.generate` takes, as `do_sample=True, temperature=0.7`.

        UserError for a tokenizer without a chat template, and for less than one new token.
        """
        check_chat_template(tokenizer)
        check_numbers(new=new, temperature=generation.get("temperature"))
        if not hasattr(engine, "new_cache"):
            raise UserTypeError(
                f"got {type(engine).__name__}, which keeps no KV cache of labkit's; expected what init_inference "
                "makes of a decoder that has kernels"
            )
        self._engine, self._tokenizer = engine, tokenizer
        self._system, self._new, self._generation = system, new, generation
        self._stops = stop_tokens(engine, tokenizer)
        if (end := end_of_turn(tokenizer)) is not None:
            self._stops.add(end)
        self.start_over()

    @property
    def positions(self) -> int | None:
        """Tokens that the context may have; None where the model sets no limit."""
        found: int | None = self._engine.model_config.max_positions
        return found

    def start_over(self) -> None:
        """Forgets all that was said but the system prompt."""
        self.messages = []
        if self._system is not None:
            self.messages.append({"role": "system", "content": self._system})
        self.context = 0
        self._forget()

    def say(self, text: str, write: Write = silent) -> Answer:
        """The model's answer to a message, which is passed to `write` piece by piece as it comes, and returned whole.

        It has at most as many tokens as there are positions left. Ctrl-C ends the answer, and what was said until then
        stays in the conversation. ContextFullError where no position is left: nothing was said then. UserError for a
        conversation that the chat template refuses.
        """
        messages = [*self.messages, {"role": "user", "content": text}]
        input_ids = render(self._tokenizer, messages)
        ids = input_ids[0].tolist()
        new = self._room(len(ids))
        cache = self._cache_before(ids)
        self._forget()  # nobody knows what an answer that fails leaves in the cache
        answer = speak(
            self._engine,
            self._tokenizer,
            input_ids,
            write,
            new=new,
            stops=self._stops,
            past_key_values=cache,
            **self._generation,
        )
        if answer.ended != "interrupted":
            self._cache, self._held = cache, [*ids, *answer.tokens][: cache.length]
        self.messages = [*messages, {"role": "assistant", "content": answer.text}]
        self.context = answer.context
        return answer

    def _room(self, tokens: int) -> int:
        """New tokens that may follow so many."""
        if self.positions is None:
            return self._new
        if tokens >= self.positions:
            raise ContextFullError(
                f"with this message the conversation has {tokens} tokens, and the model {self.positions} positions; "
                "begin a new conversation, or say less"
            )
        return min(self._new, self.positions - tokens)

    def _cache_before(self, ids: Sequence[int]) -> KVCache:
        """The cache with what it holds of `ids`, of which one at least is left to read.

        The template may render earlier turns otherwise than they were generated: what an answer's text is cut into
        need not be the tokens that the model chose, and some templates leave out parts of earlier answers.
        """
        same = takewhile(lambda pair: pair[0] == pair[1], zip(self._held, ids[:-1], strict=False))
        common = sum(1 for _ in same)
        self._cache.crop(common - len(self._held))
        return self._cache

    def _forget(self) -> None:
        self._cache = self._engine.new_cache()
        self._held = []
