"""A streamer, which gets each token once, as soon as it is chosen: in a call of several steps, or after it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from transformers.generation.streamers import BaseStreamer


@dataclass
class Listener:
    """A streamer of one generation.

    heard: number of steps whose tokens the streamer has got.
    error: what the streamer raised in a call of several steps.
    """

    streamer: BaseStreamer
    heard: int = 0
    error: BaseException | None = None

    def put(self, step: int, tokens: Tensor) -> None:
        """Gives the tokens int64 [B] of a step to the streamer, unless it has got them. Steps count from 1. Raises what
        the streamer raises, or has raised for this step.
        """
        if step > self.heard:
            self.heard = step
            self.streamer.put(tokens.cpu())
        elif step == self.heard and self.error is not None:
            raise self.error

    def put_next(self, tokens: Tensor) -> bool:
        """Gives the tokens of the next step to the streamer, and returns whether it raised nothing. A call of several
        steps uses it: `put` raises the error once the call has ended and its tokens are in the cache.
        """
        try:
            self.put(self.heard + 1, tokens)
        except BaseException as error:  # noqa: BLE001 (Ctrl-C is one, and C code can't pass it on)
            self.error = error
        return self.error is None
