"""Calls that several ranks make together: one that fails on one rank fails on all of them, and the next begins anew."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from labkit.engine.parallel.ranks import RanksDifferError
from labkit.launcher.joining import reason_of

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
                channel.fail_call(reason_of(error))
            raise
        finally:
            self._in_one = False

    def gather(self, own: Any) -> list[Any]:
        """What all ranks bring to the call that is under way, in their order: anything that pickles."""
        parts = [own]
        for channel in self._channels:
            parts = [part for of_rank in _gather_objects(channel, parts) for part in of_rank]
        return parts


def _gather_objects(channel: Channel, own: Any) -> list[Any]:
    data = torch.frombuffer(bytearray(pickle.dumps(own)), dtype=torch.uint8)
    sizes = [int(size) for size in channel.gather(torch.tensor([len(data)]))]
    everyone = channel.gather(F.pad(data, (0, max(sizes) - len(data))))
    return [pickle.loads(line[:size].numpy().tobytes()) for line, size in zip(everyone, sizes, strict=True)]


def check_names(channel: Channel, name: str) -> None:
    """Returns when all ranks are here. Raises RanksDifferError where they are not in the same call."""
    mine = torch.frombuffer(bytearray(name.encode()[:NAME_BYTES].ljust(NAME_BYTES)), dtype=torch.uint8)
    names = [bytes(each.tolist()).decode(errors="replace").strip() for each in channel.gather(mine)]
    if len(set(names)) > 1:
        raise RanksDifferError(f"the ranks make different calls: {', '.join(names)}; they must make the same ones")
