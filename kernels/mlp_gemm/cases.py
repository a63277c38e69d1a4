"""Cases of region 3."""

from dataclasses import dataclass

from ..shapes import ODD, REAL, LayerShape, Sizes


@dataclass(frozen=True)
class MlpCase:
    """bias + residual + norm + first MLP matrix + bias + activation."""

    shape: LayerShape

    @property
    def name(self) -> str:
        return self.shape.model

    @property
    def outputs(self) -> int:
        """Rows of the matrix: gate and up if the MLP is gated."""
        return self.shape.intermediate * (2 if self.shape.gated else 1)

    def bytes(self, rows: int, sizes: Sizes) -> int:
        """The matrix once, the norms, and the bias of the attention output unless it is added after the MLP."""
        shape = self.shape
        vectors = 0 if shape.shared_norm else shape.norm_numbers
        vectors += shape.norm_numbers if shape.output_norms else 0
        if "attn_out" in shape.biases and not shape.parallel:
            vectors += shape.hidden
        return sizes.vector * vectors + sizes.of_matrix(self.outputs, shape.hidden, bias="ff1" in shape.biases)

    def flops(self, rows: int) -> int:
        """Multiplications and additions of the product."""
        return 2 * rows * self.outputs * self.shape.hidden


CASES = tuple(MlpCase(shape) for shape in (*ODD, *REAL))
SMALL = tuple(MlpCase(shape) for shape in ODD)
