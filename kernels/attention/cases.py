"""Cases of region 2: a new token, a prompt after some context, or the whole sequence of an encoder."""

from dataclasses import dataclass

from ..shapes import ODD, REAL, LayerShape, Sizes


@dataclass(frozen=True)
class AttentionCase:
    """`tokens` new tokens after `past` tokens, for each sequence. A token sees the last `window` slots (None: all), and
    with `causal` no slot after its own.
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

    def bytes(self, sequences: int, sizes: Sizes) -> int:
        """The keys and values of the seen slots, once, and the sinks."""
        heads, slots = self.shape.heads, self.past + self.tokens
        if self.window is not None:
            slots = min(slots, self.window + self.tokens - 1)
        sinks = sizes.vector * heads.query if self.shape.sinks else 0
        return sinks + 2 * sequences * heads.kv * slots * (heads.dim * sizes.cache + sizes.cache_scale)

    def flops(self, sequences: int) -> int:
        """Multiplications and additions of scores and context, for all pairs of a token and a slot that it sees."""
        total = self.past + self.tokens
        if self.causal:
            pairs = seen_pairs(total, self.window) - seen_pairs(self.past, self.window)
        else:
            pairs = self.tokens * total
        return 4 * sequences * pairs * self.shape.heads.query * self.shape.heads.dim


def seen_pairs(tokens: int, window: int | None) -> int:
    """Number of pairs of a token and a slot that it sees in a causal sequence: the sum over i = 1..tokens of min(i,
    window).
    """
    full = tokens if window is None else min(tokens, window)
    return full * (full + 1) // 2 + (tokens - full) * full


SMALL = (
    *(
        AttentionCase(shape, past, tokens, window)
        for shape in ODD
        for past, tokens, window in ((0, 1, None), (70, 1, None), (70, 1, 9), (5, 13, None), (40, 37, 9))
    ),
    *(AttentionCase(shape, 0, 37, causal=False) for shape in ODD),
)
CASES = (*SMALL, *(AttentionCase(shape, past) for shape in REAL for past in (128, 1023)))
