"""Cases of region 4."""

from dataclasses import dataclass

from ..shapes import ODD, REAL, LayerShape, Sizes


@dataclass(frozen=True)
class ResidualCase:
    """residual + output + its bias; with a parallel residual also the attention output and its bias."""

    shape: LayerShape

    @property
    def name(self) -> str:
        return self.shape.model

    def bytes(self, rows: int, sizes: Sizes) -> int:
        """The biases and the norm once."""
        biases = ("ff2" in self.shape.biases) + (self.shape.parallel and "attn_out" in self.shape.biases)
        norm = self.shape.norm_numbers if self.shape.output_norms else 0
        return sizes.vector * (self.shape.hidden * biases + norm)

    def flops(self, rows: int) -> int:
        """Zero: there is no product."""
        return 0


CASES = tuple(ResidualCase(shape) for shape in (*ODD, *REAL))
SMALL = tuple(ResidualCase(shape) for shape in ODD)
