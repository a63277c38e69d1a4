"""Cases of region 4."""

from dataclasses import dataclass

from ..shapes import ODD, REAL, LayerShape


@dataclass(frozen=True)
class ResidualCase:
    """residual + output + its bias, and with a parallel residual the attention output and its bias."""

    shape: LayerShape

    @property
    def name(self) -> str:
        return self.shape.model

    def bytes(self, rows: int) -> int:
        """What is read and written, float32: three or four rows and the biases."""
        parts = 4 if self.shape.parallel else 3
        biases = ("ff2" in self.shape.biases) + (self.shape.parallel and "attn_out" in self.shape.biases)
        return 4 * self.shape.hidden * (parts * rows + biases)

    def flops(self, rows: int) -> int:
        """Additions."""
        return rows * self.shape.hidden * (4 if self.shape.parallel else 2)


CASES = tuple(ResidualCase(shape) for shape in (*ODD, *REAL))
SMALL = tuple(ResidualCase(shape) for shape in ODD)
