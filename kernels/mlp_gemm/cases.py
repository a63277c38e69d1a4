"""Cases of region 3."""

from dataclasses import dataclass

import torch

from ..shapes import ODD, REAL, LayerShape, stored_bytes


@dataclass(frozen=True)
class MlpCase:
    """bias + residual + norm + first MLP matrix + bias + activation."""

    shape: LayerShape

    @property
    def name(self) -> str:
        return self.shape.model

    @property
    def outputs(self) -> int:
        """Rows of the matrix: gate and up where the MLP is gated."""
        return self.shape.intermediate * (2 if self.shape.gated else 1)

    def bytes(self, dtype: torch.dtype) -> int:
        """What must be read: the matrix once, the norm, and the bias of the attention output."""
        vectors = (2 if self.shape.norm == "layer" else 1) + ("attn_out" in self.shape.biases)
        matrix = stored_bytes(self.outputs, self.shape.hidden, dtype, bias="ff1" in self.shape.biases)
        return 4 * self.shape.hidden * vectors + matrix

    def flops(self, rows: int) -> int:
        """Multiplications and additions of the product."""
        return 2 * rows * self.outputs * self.shape.hidden


CASES = tuple(MlpCase(shape) for shape in (*ODD, *REAL))
SMALL = tuple(MlpCase(shape) for shape in ODD)
