"""Links between ranks without GPUs: gloo behaves like NCCL. Work goes on by itself, and the host asks whether it is
done.
"""

from threading import Thread

import torch.distributed as dist
from torch import Tensor

from labkit.kernels.mailbox.device import PairLinks, Passed

NAP_S = 0.001  # of the host between two questions, which leaves the processor to other ranks


class GlooLinks(PairLinks):
    """rows_sent: number of rows sent over these links."""

    backend = "gloo"
    rows_sent = 0

    def send(self, rows: Tensor) -> Passed:
        self.rows_sent += len(rows)
        return super().send(rows)

    def computed(self) -> Passed:
        return lambda: True

    def _gpu(self) -> object:
        return dist.get_rank()

    def _passed(self, work: dist.Work) -> Passed:
        waiting = _Waiting(work)
        waiting.start()

        def passed() -> bool:
            waiting.join(NAP_S)
            if waiting.is_alive():
                return False
            self._tried(waiting.result)
            return True

        return passed


class _Waiting(Thread):
    """Thread that waits for work. Gloo moves data only while someone waits, and cannot be polled."""

    def __init__(self, work: dist.Work) -> None:
        super().__init__(daemon=True)
        self._work = work
        self._error: RuntimeError | None = None

    def run(self) -> None:
        try:
            self._work.wait()
        except RuntimeError as error:
            self._error = error

    def result(self) -> None:
        if self._error is not None:
            raise self._error
