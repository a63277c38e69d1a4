"""Cases of the plain product: attention output, second MLP matrix and LM head of every shape."""

from dataclasses import dataclass

import torch

from ..shapes import ODD, REAL, LayerShape, stored_bytes


@dataclass(frozen=True)
class GemmCase:
    """x [rows, inputs] W^T, with W [outputs, inputs]."""

    name: str
    outputs: int
    inputs: int
    bias: bool

    def bytes(self, dtype: torch.dtype) -> int:
        """What must be read: the matrix once."""
        return stored_bytes(self.outputs, self.inputs, dtype, bias=self.bias)

    def flops(self, rows: int) -> int:
        """Multiplications and additions."""
        return 2 * rows * self.outputs * self.inputs


def cases_of(shape: LayerShape) -> tuple[GemmCase, ...]:
    """The products of a layer that are no region, and the LM head."""
    context = shape.heads.query * shape.heads.dim
    return (
        GemmCase(f"{shape.model}-attn_out", shape.hidden, context, "attn_out" in shape.biases),
        GemmCase(f"{shape.model}-mlp_out", shape.hidden, shape.intermediate, "ff2" in shape.biases),
        GemmCase(f"{shape.model}-lm_head", shape.vocabulary, shape.hidden, "head" in shape.biases),
    )


CASES = tuple(case for shape in (*ODD, *REAL) for case in cases_of(shape))
SMALL = tuple(case for shape in ODD for case in cases_of(shape))
