"""Calls that several ranks make together. A call that fails on one rank fails on all; the next call begins anew."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from labkit.engine.parallel.ranks import RanksDifferError
from labkit.kernels.other_ranks import LostRankError, RankFailedError, UnexplainedError
from labkit.launcher.joining import reason_for_others
from labkit.system.errors import RunError

NAME_BYTES = 32


class Channel(Protocol):
    """Connection to other ranks: a rank group that shares layers, or a ring of stages.

    A rank that waits for another rank that has left the call by an error gets RankFailedError with the reason.
    """

    def begin_call(self) -> None:
        """Returns when all ranks have left a failed call, and its messages have been drained."""

    def gather(self, x: Tensor) -> Tensor:
        """x of one shape and type on all ranks -> [ranks, the shape of x]. All earlier messages have arrived then."""

    def fail_call(self, reason: str) -> None:
        """Tells the other ranks that this rank leaves the call by an error. Does not wait."""


class SharedCalls:
    """Shared calls of one rank.

    channels: to other ranks, which pass everything on to ranks without a channel to this one. A single process has no
    channels.
    """

    def __init__(self, channels: Sequence[Channel]) -> None:
        self._channels, self._in_one = channels, False

    @contextmanager
    def one(self, name: str) -> Iterator[None]:
        """Context of a call that all ranks make under this name, or of a part of a call that is under way. It ends when
        all ranks have ended it. Raises RankFailedError, with the rank and its reason, if another rank fails in it, and
        RanksDifferError if the ranks make different calls.
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
        except UnexplainedError as error:
            explained = self._explained(error)
            self._fail(explained)
            try:
                raise explained from None
            finally:
                del explained  # the error holds this frame: together they would keep the call's caches alive
        except BaseException as error:
            self._fail(error)
            raise
        finally:
            self._in_one = False

    def _fail(self, error: BaseException) -> None:
        for channel in self._channels:
            channel.fail_call(reason_for_others(error))

    def _explained(self, error: UnexplainedError) -> RunError:
        """The error with the reason of the rank that has failed, which posts it when it leaves the call."""
        try:
            for channel in self._channels:
                check_names(channel, str(error))
        except (RankFailedError, LostRankError) as reason:
            return reason
        except RanksDifferError:
            pass
        return error

    def gather(self, own: Any) -> list[Any]:
        """Returns the `own` objects of all ranks, in the order of the ranks. Objects must be picklable."""
        parts = [own]
        for channel in self._channels:
            parts = [part for of_rank in _gather_objects(channel, parts) for part in of_rank]
        return parts


def _gather_objects(channel: Channel, own: Any) -> list[Any]:
    data = torch.frombuffer(bytearray(pickle.dumps(own)), dtype=torch.uint8)
    sizes = [int(size) for size in channel.gather(torch.tensor([len(data)]))]
    padded = channel.gather(F.pad(data, (0, max(sizes) - len(data))))
    return [pickle.loads(line[:size].numpy().tobytes()) for line, size in zip(padded, sizes, strict=True)]


def check_names(channel: Channel, name: str) -> None:
    """Waits until all ranks call it. Raises RanksDifferError if they are not in the same call."""
    mine = torch.frombuffer(bytearray(name.encode()[:NAME_BYTES].ljust(NAME_BYTES)), dtype=torch.uint8)
    names = [bytes(line.tolist()).decode(errors="replace").strip() for line in channel.gather(mine)]
    if len(set(names)) > 1:
        raise RanksDifferError(f"the ranks make different calls: {', '.join(names)}; they must make the same ones")
