"""Calls that several ranks make together: one that fails on one rank fails on all of them, and the next begins anew."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from labkit.engine.parallel.ranks import RanksDifferError
from labkit.kernels.other_ranks import LostRankError, RankFailedError

NAME_BYTES = 32


class Channel(Protocol):
    """A way to other ranks: to those that share layers, or round a ring of stages.

    Whoever waits on it for a rank that has left the call by an error gets RankFailedError with that rank's reason.
    """

    def begin_call(self) -> None:
        """Returns when all have left a call that failed, and nothing of it is left on the way."""

    def gather(self, x: Tensor) -> Tensor:
        """x of one shape and type on all ranks -> [ranks, the shape of x]. Then all have what was sent before."""

    def fail_call(self, reason: str) -> None:
        """Says to the others that this rank leaves the call by an error, and waits for nobody."""


class SharedCalls:
    """The calls of one rank. channels: to the others, which reach from there those that are on no channel of this rank;
    a process by itself has none.
    """

    def __init__(self, channels: Sequence[Channel]) -> None:
        self._channels, self._in_one = channels, False

    @contextmanager
    def one(self, name: str) -> Iterator[None]:
        """What runs within is a call that all ranks make under this name, or a part of one that is under way. It ends
        when all ranks are through. Raises RankFailedError, with the rank and its reason, where another one fails in it,
        and RanksDifferError where the ranks make different calls.
        """
        if self._in_one:
            yield
            return
        self._in_one = True
        try:
            for channel in self._channels:
                channel.begin_call()
                check_names(channel, name)
            yield
            for channel in self._channels:
                check_names(channel, f"end of {name}")
        except BaseException as error:
            for channel in self._channels:
                channel.fail_call(_reason(error))
            raise
        finally:
            self._in_one = False


def check_names(channel: Channel, name: str) -> None:
    """Returns when all ranks are here. Raises RanksDifferError where they are not in the same call."""
    mine = torch.frombuffer(bytearray(name.encode()[:NAME_BYTES].ljust(NAME_BYTES)), dtype=torch.uint8)
    names = [bytes(each.tolist()).decode(errors="replace").strip() for each in channel.gather(mine)]
    if len(set(names)) > 1:
        raise RanksDifferError(f"the ranks make different calls: {', '.join(names)}; they must make the same ones")


def _reason(error: BaseException) -> str:
    """On one line. What another rank has said is passed on as it is."""
    said = " ".join(str(error).split())
    if isinstance(error, RankFailedError | LostRankError):
        return said
    return f"rank {dist.get_rank()}: {type(error).__name__}" + (f": {said}" if said else "")
