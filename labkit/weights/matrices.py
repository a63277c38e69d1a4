"""The packed matrices of a model by their canonical names."""

from __future__ import annotations

from dataclasses import dataclass

from labkit.kernels.decode_step import EmbeddingWeights, HeadWeights
from labkit.kernels.types import Linear, Norm


@dataclass(frozen=True)
class Outside:
    """A rank's weights outside the layers; see ModelWeights."""

    embedding: EmbeddingWeights | None
    final_norm: Norm | None
    head: HeadWeights | None

    def matrices(self) -> dict[str, Linear]:
        """Packed matrices by canonical name; an embedding that the head does not share is rows."""
        linears: dict[str, Linear | None] = {}
        if self.embedding is not None:
            table = self.embedding.table
            rows = self.embedding.packed
            if rows is None:
                assert table is not None
                rows = Linear(table, None, table.shape[0], table.shape[1], "rows")
            linears |= {"embed.weight": rows, "project_in.weight": self.embedding.project_in}
        if self.head is not None:
            tied = self.embedding is not None and self.embedding.packed is not None
            linears |= {"project_out.weight": self.head.project_out}
            linears |= {} if tied else {"head.weight": self.head.matrix}
        return {name: linear for name, linear in linears.items() if linear is not None}
