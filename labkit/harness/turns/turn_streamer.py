"""A generation that pauses after a few tokens, until it is told to go on."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter_ns
from typing import Any

import torch
from transformers.generation import BaseStreamer

GO_ON = "go_on"  # the request after which a paused generation continues


class LeftError(Exception):
    """A paused generation got another request than `GO_ON`. It ends here, and the request is still to be answered."""

    def __init__(self, request: dict[str, Any]) -> None:
        super().__init__("the generation was left in the middle")
        self.request = request


class TurnStreamer(BaseStreamer):
    """Ends a turn after the first token, and from then on after as many tokens as were asked for.

    At the end of a turn `exchange` gets its result, which is what `taken` returns, and returns the next request:
    `{"op": "go_on", "tokens": n}` continues. Any other request raises LeftError out of the generation.
    """

    def __init__(self, exchange: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        self._exchange = exchange
        self._left = 1  # tokens of this turn that are still to come
        self._steps_ms: list[float] = []
        self._tokens: list[list[int]] = []
        self._last_ns = perf_counter_ns()

    def put(self, value: torch.Tensor) -> None:
        """Takes the tokens of a step, one for each sequence. The prompt, in 2-D, is left out."""
        if value.ndim > 1:
            return
        self._steps_ms.append((perf_counter_ns() - self._last_ns) / 1e6)
        self._tokens.append(value.tolist())
        self._left -= 1
        if self._left == 0:
            request = self._exchange(self.taken())
            if request["op"] != GO_ON:
                raise LeftError(request)
            self._left = request["tokens"]
        self._last_ns = perf_counter_ns()

    def taken(self) -> dict[str, Any]:
        """Milliseconds of each step of this turn, and its tokens [step, sequence]. The next turn begins."""
        turn = {"steps_ms": self._steps_ms, "tokens": self._tokens}
        self._steps_ms, self._tokens = [], []
        return turn

    def end(self) -> None:
        return
