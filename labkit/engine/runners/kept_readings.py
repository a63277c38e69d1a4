"""The ways to read weights that earlier processes chose, kept in labkit's cache.

A choice takes about a hundred steps, some of them twice as long as with the fastest way: the first 32 tokens of gpt2
took 8.8 ms each in int8 with all ways in turns, and 4.5 ms with the kept one (Sapphire Rapids, 2 threads). So the next
process with the same engine begins with the kept way, and two sides of a comparison read in the same way.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pydantic import Field

from labkit.kernels.decode_step.weights import ModelWeights
from labkit.kernels.reading import READINGS
from labkit.kernels.types import Linear
from labkit.statistics.kept_records import KeptRecord, Machine, kept_file, read_kept, write_kept
from labkit.system.errors import UserError

KEPT, NAME = "readings.json", "readings"


class KeptReading(KeptRecord):
    """The fastest way for one kind of decode steps."""

    machine: Machine
    kernels: str  # name of the compiled library, which changes with every source and flag
    matrices: str
    threads: int = Field(ge=1)
    rows: int = Field(ge=1)  # sequences in a step
    way: str  # in READINGS

    def is_as(self, other: KeptReading) -> bool:
        """Whether both are of the same kind of steps."""
        return self._steps == other._steps and self.machine.is_same(other.machine)

    @property
    def _steps(self) -> tuple[str, str, int, int]:
        return self.kernels, self.matrices, self.threads, self.rows


@dataclass(frozen=True)
class KeptReadings:
    """The kept ways of an engine, by number of threads and rows.

    kernels: name of the compiled library. matrices: what a step reads. folder: by default labkit's cache.
    """

    kernels: str
    matrices: str
    folder: Path | None = None

    def way(self, threads: int, rows: int) -> int | None:
        """The kept way, as an index into READINGS; None: none is kept."""
        wanted = self._record(threads, rows, "")
        kept = read_kept(kept_file(KEPT, self.folder), NAME, KeptReading)
        ways = [record.way for record in kept if record.is_as(wanted) and record.way in READINGS]
        return READINGS.index(ways[-1]) if ways else None

    def keep(self, threads: int, rows: int, way: int) -> None:
        """Keeps a way instead of an earlier one. Does nothing where the cache cannot be written."""
        file, record = kept_file(KEPT, self.folder), self._record(threads, rows, READINGS[way])
        if file is None:
            return
        with suppress(OSError, UserError):
            write_kept(file, NAME, record, replaces=record.is_as)

    def _record(self, threads: int, rows: int, way: str) -> KeptReading:
        return KeptReading(
            machine=Machine.here(), kernels=self.kernels, matrices=self.matrices, threads=threads, rows=rows, way=way
        )


def matrices_text(weights: ModelWeights, *, streamed: bool) -> str:
    """What a decode step reads: the shapes and types of the matrices of each kind of layer and of the head, and the
    number of layers. streamed: whether layers come from a backing store.
    """
    kinds = dict.fromkeys(", ".join(map(_text, layer.matrices.values())) for layer in weights.layers)
    head = "" if weights.head is None else f"; {_text(weights.head.matrix)}"
    return f"{len(weights.layers)} {'streamed ' if streamed else ''}layers of {' or '.join(kinds)}{head}"


def _text(matrix: Linear) -> str:
    codes = f"int{matrix.bits}-{matrix.group or 'row'}"
    stored = str(matrix.weight.dtype).removeprefix("torch.") if matrix.scales is None else codes
    return f"{matrix.outputs}x{matrix.inputs} {stored}"
