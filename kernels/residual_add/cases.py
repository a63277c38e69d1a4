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
        shape = self.shape
        of_mlp = "ff2" in shape.biases and not shape.experts  # experts add theirs
        biases = of_mlp + (shape.parallel and "attn_out" in shape.biases)
        norm = shape.norm_numbers if shape.output_norms else 0
        return sizes.vector * (shape.hidden * biases + norm)

    def flops(self, rows: int) -> int:
        """Zero: there is no product."""
        return 0


CASES = tuple(ResidualCase(shape) for shape in (*ODD, *REAL))
SMALL = tuple(ResidualCase(shape) for shape in ODD)
