"""Cases of region 2: a new token, a prompt after some context, or the whole sequence of an encoder."""

from dataclasses import dataclass

import torch

from ..shapes import ODD, REAL, LayerShape
from ..types import float_dtype


@dataclass(frozen=True)
class AttentionCase:
    """`tokens` new tokens after `past` for each sequence; `window` slots are seen (None: all), with `causal` none
    behind a token itself.
    """

    shape: LayerShape
    past: int
    tokens: int = 1
    window: int | None = None
    causal: bool = True

    @property
    def name(self) -> str:
        seen = f"-window{self.window}" if self.window else "" if self.causal else "-whole"
        return f"{self.shape.model}-{self.past}+{self.tokens}{seen}"

    def bytes(self, batch: int, dtype: torch.dtype) -> int:
        """What must be read: the keys and values of the slots that are seen, once."""
        heads, slots = self.shape.heads, self.past + self.tokens
        if self.window is not None:
            slots = min(slots, self.window + self.tokens - 1)
        return 2 * batch * heads.kv * heads.dim * slots * float_dtype(dtype).itemsize

    def flops(self, batch: int) -> int:
        """Multiplications and additions of scores and context, for the pairs of token and slot that are seen."""
        total = self.past + self.tokens
        ends = range(self.past + 1, total + 1) if self.causal else [total] * self.tokens
        pairs = sum(end if self.window is None else min(end, self.window) for end in ends)
        return 4 * batch * pairs * self.shape.heads.query * self.shape.heads.dim


SMALL = (
    *(
        AttentionCase(shape, past, tokens, window)
        for shape in ODD
        for past, tokens, window in ((0, 1, None), (70, 1, None), (70, 1, 9), (5, 13, None), (40, 37, 9))
    ),
    *(AttentionCase(shape, 0, 37, causal=False) for shape in ODD),
)
CASES = (*SMALL, *(AttentionCase(shape, past) for shape in REAL for past in (128, 1023)))
