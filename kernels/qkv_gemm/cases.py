"""Cases of region 1."""

from dataclasses import dataclass

from ..shapes import ODD, REAL, LayerShape, Sizes


@dataclass(frozen=True)
class QkvCase:
    """Norm, product to query, key and value heads, norms of the heads, rotation and append."""

    shape: LayerShape

    @property
    def name(self) -> str:
        return self.shape.model

    @property
    def outputs(self) -> int:
        """Rows of the matrix."""
        return (self.shape.heads.query + 2 * self.shape.heads.kv) * self.shape.heads.dim

    def bytes(self, rows: int, sizes: Sizes) -> int:
        """The matrix once, and the norms."""
        heads = self.shape.heads
        normed = heads.query + heads.kv if self.shape.qk_norm_whole else 2
        norms = self.shape.norm_numbers + (normed * heads.dim if self.shape.qk_norm else 0)
        matrix = sizes.of_matrix(self.outputs, self.shape.hidden, bias="qkv" in self.shape.biases)
        return sizes.vector * norms + matrix

    def flops(self, rows: int) -> int:
        """Multiplications and additions of the product."""
        return 2 * rows * self.outputs * self.shape.hidden


CASES = tuple(QkvCase(shape) for shape in (*ODD, *REAL))
SMALL = tuple(QkvCase(shape) for shape in ODD)
