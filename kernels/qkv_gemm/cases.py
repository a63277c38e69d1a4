"""Cases of region 1."""

from dataclasses import dataclass

import torch

from ..shapes import ODD, REAL, LayerShape, stored_bytes


@dataclass(frozen=True)
class QkvCase:
    """norm, product to query, key and value heads, rotation and append."""

    shape: LayerShape

    @property
    def name(self) -> str:
        return self.shape.model

    @property
    def outputs(self) -> int:
        """Rows of the matrix."""
        return (self.shape.heads.query + 2 * self.shape.heads.kv) * self.shape.heads.dim

    def bytes(self, dtype: torch.dtype) -> int:
        """What must be read: the matrix once, and the norm."""
        norm = 4 * self.shape.hidden * (2 if self.shape.norm == "layer" else 1)
        return norm + stored_bytes(self.outputs, self.shape.hidden, dtype, bias="qkv" in self.shape.biases)

    def flops(self, rows: int) -> int:
        """Multiplications and additions of the product."""
        return 2 * rows * self.outputs * self.shape.hidden


CASES = tuple(QkvCase(shape) for shape in (*ODD, *REAL))
SMALL = tuple(QkvCase(shape) for shape in ODD)
