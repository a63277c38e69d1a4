"""Calls that several ranks make together: one that fails on one rank fails on all of them, and the next begins anew."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch.distributed as dist

from labkit.kernels.other_ranks import LostRankError, RankFailedError


class Channel(Protocol):
    """A way to other ranks: an exchange between those that share layers, or a ring between stages.

    Whoever waits on it for a rank that has left the call by an error gets RankFailedError with that rank's reason.
    """

    def begin_call(self) -> None:
        """Returns when all have left a call that failed, and nothing of it is left on the way."""

    def meet(self) -> None:
        """Returns when all are here, and have what was sent to them."""

    def fail_call(self, reason: str) -> None:
        """Says to the others that this rank leaves the call by an error, and waits for nobody."""


class SharedCalls:
    """The calls of one rank. channels: to the others, which reach from there those that are on no channel of this rank;
    a process by itself has none.
    """

    def __init__(self, channels: Sequence[Channel]) -> None:
        self._channels, self._in_one = channels, False

    @contextmanager
    def one(self) -> Iterator[None]:
        """What runs within is a call that all ranks make, or a part of one that is under way. It ends when all ranks
        are through. Raises RankFailedError, with the rank and its reason, where another one fails in it.
        """
        if self._in_one:
            yield
            return
        self._in_one = True
        try:
            for channel in self._channels:
                channel.begin_call()
            yield
            for channel in self._channels:
                channel.meet()
        except BaseException as error:
            for channel in self._channels:
                channel.fail_call(_reason(error))
            raise
        finally:
            self._in_one = False


def _reason(error: BaseException) -> str:
    """On one line. What another rank has said is passed on as it is."""
    said = " ".join(str(error).split())
    if isinstance(error, RankFailedError | LostRankError):
        return said
    return f"rank {dist.get_rank()}: {type(error).__name__}" + (f": {said}" if said else "")
