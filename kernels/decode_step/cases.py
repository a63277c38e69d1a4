"""The least work of a whole model step: the sum of its ops, each counted in its own `cases.py`."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from labkit.stages import Stage

from ..layer_ops import Pass, layer_cases
from ..shapes import ModelShape, OpCase, Sizes


@dataclass(frozen=True)
class EmbedCase:
    """Rows of the embedding and of the position table looked up, normed and projected to the hidden width."""

    shape: ModelShape

    def bytes(self, rows: int, sizes: Sizes) -> int:
        """A row of each table for every token, the norm, and the projection, which has no scales."""
        shape, hidden = self.shape, self.shape.layer.hidden
        lookups = rows * (shape.embedding + (hidden if shape.learned_positions else 0))
        projection = hidden * shape.embedding if shape.projected else 0
        norm = shape.layer.norm_numbers if shape.embedding_norm else 0
        return sizes.matrix * (lookups + projection) + sizes.vector * norm

    def flops(self, rows: int) -> int:
        """Multiplications and additions of the projection."""
        return 2 * rows * self.shape.layer.hidden * self.shape.embedding if self.shape.projected else 0


@dataclass(frozen=True)
class HeadCase:
    """The last norm, the projection to the width of the embedding, and the product with the vocabulary."""

    shape: ModelShape

    @property
    def outputs(self) -> int:
        return self.shape.layer.vocabulary

    def bytes(self, rows: int, sizes: Sizes) -> int:
        """The norm, the projection, which has no scales, and the matrix of the head."""
        shape = self.shape
        norm = shape.layer.norm_numbers if shape.final_norm else 0
        projection = shape.layer.hidden * shape.embedding if shape.projected else 0
        head = sizes.of_matrix(self.outputs, shape.embedding, bias="head" in shape.layer.biases)
        return sizes.vector * norm + sizes.matrix * projection + head

    def flops(self, rows: int) -> int:
        """Multiplications and additions of both products."""
        projection = self.shape.layer.hidden if self.shape.projected else 0
        return 2 * rows * self.shape.embedding * (self.outputs + projection)


@dataclass(frozen=True)
class StepCase:
    """`tokens` new tokens after `past` tokens, for each sequence, through all layers. Logits of the last token only."""

    shape: ModelShape
    past: int
    tokens: int = 1

    def bytes(self, sequences: int, sizes: Sizes) -> int:
        """Every weight of a product once, the rows that are looked up, and the seen part of the cache."""
        return sum(times * case.bytes(rows, sizes) for case, rows, times in self._ops(sequences))

    def flops(self, sequences: int) -> int:
        """Multiplications and additions of the products."""
        return sum(times * case.flops(rows) for case, rows, times in self._ops(sequences))

    def _ops(self, sequences: int) -> Iterator[tuple[OpCase, int, int]]:
        """The ops of the step, each with the number of its rows (attention: sequences) and of its runs."""
        tokens = sequences * self.tokens
        yield EmbedCase(self.shape), tokens, 1
        for (shape, window), layers in Counter(self.shape.layers()).items():
            for stage, case in layer_cases(shape, Pass(self.past, self.tokens, window)).items():
                yield case, sequences if stage == Stage.ATTENTION else tokens, layers
        yield HeadCase(self.shape), sequences, 1
