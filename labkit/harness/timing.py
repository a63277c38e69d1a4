"""Times one generation: prefill ends with the first token, and every further token is one decode step.

Arithmetic bounds the time to the first token (TTFT), and memory bounds the time per token. A mean over the whole call
would hide both. A streamer notes the times. Every Hugging Face model and the engine's fast loop feed it in the same
way: with tokens that the CPU has already read, so a GPU's work counts for the right token.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Any, Protocol

import numpy as np
import torch
from transformers.generation import BaseStreamer

from labkit.system.errors import UserError

CLOCK = "time.perf_counter_ns, stamped as the streamer receives each token"


class Generator(Protocol):
    """A vanilla model, an engine or a baseline, which generates as Hugging Face models do."""

    def generate(self, input_ids: torch.Tensor, **kwargs: Any) -> torch.Tensor: ...


class TokenClock(BaseStreamer):
    """A streamer that notes the time of each new token, and calls `at_first` at the first one. The prompt comes first,
    in 2-D, and is left out.
    """

    def __init__(self, at_first: Callable[[], object] | None = None) -> None:
        self.stamps_ns: list[int] = []
        self._at_first = at_first

    def put(self, value: torch.Tensor) -> None:
        if value.ndim >= 2:
            return
        if self._at_first is not None and not self.stamps_ns:
            self._at_first()
        self.stamps_ns.append(perf_counter_ns())

    def end(self) -> None:
        return


@dataclass(frozen=True)
class Times:
    """Milliseconds from the call to the first token, of each decode step after it, and of the whole call."""

    ttft_ms: float
    decode_ms: tuple[float, ...]
    end_to_end_ms: float


def timed_generate(
    generator: Generator,
    input_ids: torch.Tensor,
    *,
    stamps_ns: Callable[[], Sequence[int]] | None = None,
    at_first: Callable[[], object] | None = None,
    **generation_args: Any,
) -> tuple[Times, torch.Tensor]:
    """The times of one `generate` call, and the whole sequences that it returned. Needs at least two new tokens.

    stamps_ns: returns the time of each new token (perf_counter_ns) after the call; None: a streamer notes the times.
    at_first: called by the streamer at the first token.
    """
    clock = TokenClock(at_first)
    streamer = {"streamer": clock} if stamps_ns is None else {}
    with collector_paused():
        wait_for_gpu()
        start = perf_counter_ns()
        sequences = generator.generate(input_ids, **streamer, **generation_args)
        wait_for_gpu()
        end = perf_counter_ns()
    stamps = clock.stamps_ns if stamps_ns is None else stamps_ns()
    if len(stamps) < 2:
        raise UserError(
            f"got {len(stamps)} new token(s), expected at least 2, because the time per token is the time of "
            "a decode step; raise max_new_tokens, and min_new_tokens where an end-of-text token comes early"
        )
    times = Times(
        ttft_ms=(stamps[0] - start) / 1e6,
        decode_ms=tuple((np.diff(stamps) / 1e6).tolist()),
        end_to_end_ms=(end - start) / 1e6,
    )
    return times, sequences


def wait_for_gpu() -> None:
    """Waits until the GPU has finished all work of this process. Does nothing where no GPU is in use."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


@contextmanager
def collector_paused() -> Iterator[None]:
    """Collects garbage before the run in this context, and not during the run."""
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
