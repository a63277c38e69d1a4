"""The machines of a run tell each other that they are alive, and why the run ends, in the store of the rendezvous.

Each machine has a pulse that the others check. While `labkit launch` on a machine is stopped by Ctrl-Z it has no pulse,
but its ranks go on. It announces this pause first, so that the others do not take it for lost.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from threading import Event, Thread

from torch.distributed import PrefixStore, Store, TCPStore

BEAT_S = 1.0  # between two beats of a machine's pulse
SILENT_S = 8.0  # a machine without a new beat for this time is lost
REACH_S = 3.0  # to reach the store with a message, and for all machines to read it
PAUSE_S = 0.05
CAUSE, HEARD, COUNT = "cause", "heard", "machines"


class Machines:
    """This machine among the `count` machines of a run, whose store is at `host`:`port`.

    has_store: whether the store is on this machine. join_s: how long to wait until the store exists.
    """

    def __init__(self, host: str, port: int, count: int, *, has_store: bool, join_s: float) -> None:
        self._where, self.count, self._has_store, self._join_s = (host, port), count, has_store, join_s
        self.name = socket.gethostname()
        self.reported: str | None = None  # why another machine ended the run
        self.is_pausing = False
        self._over, self._beats = Event(), 0
        self._beats_seen, self._still_s = 0, 0.0  # `_beats` when `lost` last saw a new one, and seconds since then
        self._somebody_pauses = False
        self._heard: dict[int, tuple[int, float]] = {}  # latest beat of each machine, and seconds since it changed
        self._pulse = Thread(target=self._beat, daemon=True)
        self._pulse.start()

    def lost(self, since_s: float) -> str | None:
        """The reason why this machine can't go on with the others; None if it can. The caller asks every `since_s`
        seconds, so that time in which this machine itself was stopped does not count.
        """
        if self.reported is not None or self._beats != self._beats_seen or self._beats == 0 or self._somebody_pauses:
            self._beats_seen, self._still_s = self._beats, 0.0
            return self.reported
        self._still_s += since_s
        host, port = self._where
        if self._still_s < SILENT_S:
            return None
        return f"error: the machine of the rendezvous {host}:{port} has not been heard of for {SILENT_S:.0f} s"

    def tell(self, cause: str) -> str:
        """Tells the others why the run ends. Returns the cause that was told first, by any machine."""
        return self._answer(lambda store: store.compare_set(CAUSE, "", cause)) or cause

    def hear(self) -> str | None:
        """The cause that another machine tells; None if none does in time."""

        def awaited_cause(store: Store) -> bytes:
            _wait(lambda: store.check([CAUSE]))
            return store.get(CAUSE) if store.check([CAUSE]) else b""

        return self._answer(awaited_cause) or None

    def pause(self) -> None:
        """Tells the others that the pulse of this machine will pause; returns when they know."""
        self.is_pausing = True
        time.sleep(2.5 * BEAT_S)

    def leave(self) -> None:
        self._over.set()

    def _answer(self, question: Callable[[Store], bytes]) -> str | None:
        """The cause that the store answers with; None if it can't be reached. The store ends with its machine, which
        therefore waits until all machines have read the cause.
        """
        answers: list[str] = []

        def ask() -> None:
            with suppress(RuntimeError, OSError):
                socket.create_connection(self._where, timeout=REACH_S).close()  # torch would log a lot if it failed
                store = self._store(REACH_S)
                answers.append(question(store).decode())
                store.add(HEARD, 1)
                if self._has_store:
                    _wait(lambda: store.add(HEARD, 0) == self.count)

        asking = Thread(target=ask, daemon=True)  # a call to the store of a stopped machine never returns
        asking.start()
        asking.join(2 * REACH_S)
        return answers[0] if answers else None

    def _store(self, timeout_s: float) -> Store:
        host, port = self._where
        limit = timedelta(seconds=timeout_s)
        return PrefixStore("labkit/launch", TCPStore(host, port, None, False, limit, wait_for_workers=False))

    def _beat(self) -> None:
        with suppress(RuntimeError):  # the store was lost with its machine: `lost` notices that no pulse arrives
            store = self._store(self._join_s)
            number = store.add(COUNT, 1) - 1
            while not self._over.wait(BEAT_S):
                self._beats += 1
                store.set(str(number), json.dumps((self._beats, self.is_pausing, self.name)))
                if store.check([CAUSE]):
                    self.reported = store.get(CAUSE).decode()
                else:
                    keys = map(str, range(self.count))
                    self._listen([json.loads(store.get(key)) for key in keys if store.check([key])])

    def _listen(self, pulses: list[tuple[int, bool, str]]) -> None:
        """Checks the latest pulses (beats, is_pausing, name) of the machines, in the order in which they joined."""
        self._somebody_pauses = any(is_pausing for _, is_pausing, _ in pulses)
        for number, (beats, _, name) in enumerate(pulses):
            before, silent_s = self._heard.get(number, (0, 0.0))
            silent_s = silent_s + BEAT_S if beats == before and not self._somebody_pauses else 0.0
            self._heard[number] = beats, silent_s
            if silent_s >= SILENT_S:
                self.reported = f"error: the machine {name} has not been heard of for {SILENT_S:.0f} s"


def _wait(condition: Callable[[], bool]) -> None:
    """Waits until the condition holds, REACH_S at most."""
    deadline = time.monotonic() + REACH_S
    while not condition() and time.monotonic() < deadline:
        time.sleep(PAUSE_S)
