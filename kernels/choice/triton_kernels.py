"""Choice of the next token in Triton. One program chooses for one sequence, with the rules of a table in memory.

V tokens of the vocabulary, read block by block. Removed tokens have the score -inf.
"""

import triton
import triton.language as tl

from ..tiles import wait_for_previous

HEADER, FIELDS = 2, 5  # numbers of the table: length of the text, number of rules; then of each rule
PENALTY_OF_TEXT, PENALTY_OF_IDS, TEMPERATURE, SET_SCORES, ONLY_TOKENS, BIAS, DECAY, NGRAM = (
    tl.constexpr(kind) for kind in range(8)
)
TOP_K, TOP_P, MIN_P, TYPICAL, EPSILON, ETA = (tl.constexpr(kind) for kind in range(8, 14))
RULES_AT, RULE_SIZE = tl.constexpr(HEADER), tl.constexpr(FIELDS)
REMOVED = tl.constexpr(float("-inf"))
DOUBT = tl.constexpr(64 * 2.0**-24)  # relative error that rounding leaves in torch's probabilities and their sums
NEAR = tl.constexpr(3e-5)  # relative distance of two draws that rounding could exchange


@triton.jit
def copy(to_ptr, from_ptr, V, BLOCK: tl.constexpr):
    for begin in range(0, V, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        tl.store(to_ptr + at, tl.load(from_ptr + at, mask=at < V), mask=at < V)
    tl.debug_barrier()


@triton.jit
def ends_with(text_ptr, length, ids_ptr, count):
    """Whether a text of `length` tokens ends with `count` ids."""
    equal = count <= length
    for i in range(count):
        there = length - count + i
        equal = equal & (tl.load(text_ptr + there, mask=there >= 0, other=-1) == tl.load(ids_ptr + i))
    return equal


@triton.jit
def change_ids(scores_ptr, before_ptr, V, kind, value, ids_ptr, count, BLOCK: tl.constexpr):
    """Changes the scores of ids. The new scores are computed from `before`, so an id that occurs twice changes once."""
    for begin in range(0, count, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        ids = tl.load(ids_ptr + at, mask=at < count, other=-1)
        inside = (ids >= 0) & (ids < V)
        score = tl.load(before_ptr + ids, mask=inside, other=0.0)
        new = tl.zeros_like(score) + value
        if kind <= PENALTY_OF_IDS:
            new = tl.where(score < 0, score * value, tl.div_rn(score, new))
        elif kind == BIAS:
            new = score + value
        elif kind == DECAY:  # the product is rounded before the sum, as torch does it
            more = (tl.abs(score).to(tl.float64) * value.to(tl.float64)).to(tl.float32)
            new = tl.where(tl.abs(score) < float("inf"), score + more, score)
        tl.store(scores_ptr + ids, new, mask=inside)


@triton.jit
def remove_repeated(scores_ptr, V, text_ptr, length, size, BLOCK: tl.constexpr):
    """Removes tokens that would end a run of `size` tokens that the text has already."""
    for begin in range(0, length + 1 - size, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        repeated = at + size <= length
        for i in range(size - 1):
            ending = tl.load(text_ptr + length + 1 - size + i)
            repeated = repeated & (tl.load(text_ptr + at + i, mask=repeated, other=-1) == ending)
        ids = tl.load(text_ptr + at + size - 1, mask=repeated, other=-1)
        tl.store(scores_ptr + ids, tl.full((BLOCK,), REMOVED, tl.float32), mask=(ids >= 0) & (ids < V))


@triton.jit
def change(scores_ptr, before_ptr, V, rule_ptr, ids_ptr, row, text_ptr, length, BLOCK: tl.constexpr):
    """Changes scores by one rule."""
    kind, count = tl.load(rule_ptr), tl.load(rule_ptr + 4)
    value = tl.load(rule_ptr + 2).to(tl.int32).to(tl.float32, bitcast=True)
    copy(before_ptr, scores_ptr, V, BLOCK)
    if (kind == TEMPERATURE) | (kind == ONLY_TOKENS):
        for begin in range(0, V, BLOCK):
            at = begin + tl.arange(0, BLOCK)
            score = tl.load(before_ptr + at, mask=at < V, other=0.0)
            new = tl.where(kind == TEMPERATURE, tl.div_rn(score, tl.zeros_like(score) + value), REMOVED)
            tl.store(scores_ptr + at, new, mask=at < V)
        tl.debug_barrier()
    if kind == PENALTY_OF_TEXT:
        change_ids(scores_ptr, before_ptr, V, kind, value, text_ptr + count, length - count, BLOCK)
    elif kind == PENALTY_OF_IDS:
        change_ids(scores_ptr, before_ptr, V, kind, value, ids_ptr + row * count, count, BLOCK)
    elif kind == BIAS:
        if ends_with(text_ptr, length, ids_ptr, count - 1):
            change_ids(scores_ptr, before_ptr, V, kind, value, ids_ptr + count - 1, 1, BLOCK)
    elif kind == NGRAM:
        remove_repeated(scores_ptr, V, text_ptr, length, count, BLOCK)
    elif kind != TEMPERATURE:
        change_ids(scores_ptr, before_ptr, V, kind, value, ids_ptr, count, BLOCK)
    tl.debug_barrier()


@triton.jit
def ordered(score, centre, CENTRED):
    """Integers in the order of the scores, or of their distances to `centre`, the nearest last."""
    x = tl.where(CENTRED, -tl.abs(score - centre), score)
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def weight_of(score, top):
    return tl.where(score == REMOVED, 0.0, tl.exp(score - top))


@triton.jit
def least_key(scores_ptr, V, top, counts, mass, centre, centred, BLOCK: tl.constexpr):
    """The largest key at or above which tokens have this mass: their weights, or with `counts` their number. Finds two
    of the key's bits in a pass over the scores.
    """
    low = tl.full((), -(2**31), tl.int64)
    for digit in range(16):
        step = tl.full((), 1, tl.int64) << (30 - 2 * digit)
        one = tl.zeros((BLOCK,), tl.float32)
        two = tl.zeros((BLOCK,), tl.float32)
        three = tl.zeros((BLOCK,), tl.float32)
        for begin in range(0, V, BLOCK):
            at = begin + tl.arange(0, BLOCK)
            score = tl.load(scores_ptr + at, mask=at < V, other=REMOVED)
            weight = tl.where(at < V, tl.where(counts, 1.0, weight_of(score, top)), 0.0)
            key = ordered(score, centre, centred).to(tl.int64)
            one += tl.where(key >= low + step, weight, 0.0)
            two += tl.where(key >= low + 2 * step, weight, 0.0)
            three += tl.where(key >= low + 3 * step, weight, 0.0)
        reached = (tl.sum(one) >= mass).to(tl.int64) + (tl.sum(two) >= mass).to(tl.int64)
        low += step * (reached + (tl.sum(three) >= mass).to(tl.int64))
    return low


@triton.jit
def largest(scores_ptr, V, BLOCK: tl.constexpr):
    """Returns the largest score, its first token, and whether the scores can be chosen from."""
    tops = tl.full((BLOCK,), REMOVED, tl.float32)
    where = tl.zeros((BLOCK,), tl.int32)
    unusable = tl.zeros((BLOCK,), tl.int32)
    for begin in range(0, V, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        score = tl.load(scores_ptr + at, mask=at < V, other=REMOVED)
        unusable |= tl.where(score < float("inf"), 0, 1)  # also NaN
        where = tl.where(score > tops, at, where)
        tops = tl.maximum(tops, score)
    top = tl.max(tops, axis=0)
    token = tl.min(tl.where(tops == top, where, V), axis=0)
    return top, token, (tl.max(unusable, axis=0) == 0) & (top > REMOVED)


@triton.jit
def weigh(scores_ptr, V, BLOCK: tl.constexpr):
    """Returns the largest score, the sum of all weights, the entropy, and whether the scores can be chosen from."""
    top, _, usable = largest(scores_ptr, V, BLOCK)
    weights = tl.zeros((BLOCK,), tl.float32)
    surprises = tl.zeros((BLOCK,), tl.float32)  # below the top, by weight
    for begin in range(0, V, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        score = tl.load(scores_ptr + at, mask=at < V, other=REMOVED)
        weight = weight_of(score, top)
        weights += weight
        surprises += tl.where(score == REMOVED, 0.0, weight * (top - score))
    total = tl.sum(weights, axis=0)
    entropy = tl.sum(surprises, axis=0) / total + tl.log(total)
    return top, total, entropy, usable


@triton.jit
def around_key(scores_ptr, V, top, key, centre, centred, doubt, BLOCK: tl.constexpr):
    """Number and weight of the tokens at or above a key, weight of those above it, and number of tokens so near to the
    key that rounding could exchange them.
    """
    count = tl.zeros((BLOCK,), tl.float32)
    weight_from = tl.zeros((BLOCK,), tl.float32)
    weight_above = tl.zeros((BLOCK,), tl.float32)
    near = tl.zeros((BLOCK,), tl.float32)
    bits = key.to(tl.int32) ^ ((key.to(tl.int32) >> 31) & 0x7FFFFFFF)
    distance = tl.abs(bits.to(tl.float32, bitcast=True))
    for begin in range(0, V, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        score = tl.load(scores_ptr + at, mask=at < V, other=REMOVED)
        weight, own = weight_of(score, top), ordered(score, centre, centred).to(tl.int64)
        is_near = tl.where(centred, tl.abs(tl.abs(score - centre) - distance) < doubt, own == key)
        count += tl.where((score != REMOVED) & (own >= key), 1.0, 0.0)
        weight_from += tl.where(own >= key, weight, 0.0)
        weight_above += tl.where(own > key, weight, 0.0)
        near += tl.where((score != REMOVED) & is_near, 1.0, 0.0)
    return tl.sum(count), tl.sum(weight_from), tl.sum(weight_above), tl.sum(near)


@triton.jit
def around_weight(scores_ptr, V, top, least, doubt, BLOCK: tl.constexpr):
    """Number of tokens that may have this weight, and number of tokens for which rounding decides."""
    likely = tl.zeros((BLOCK,), tl.float32)
    doubtful = tl.zeros((BLOCK,), tl.float32)
    for begin in range(0, V, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        score = tl.load(scores_ptr + at, mask=at < V, other=REMOVED)
        weight = weight_of(score, top)
        likely += tl.where((score != REMOVED) & (weight >= least * (1 - doubt)), 1.0, 0.0)
        doubtful += tl.where((score != REMOVED) & (tl.abs(weight - least) <= least * doubt), 1.0, 0.0)
    return tl.sum(likely), tl.sum(doubtful)


@triton.jit
def remove(scores_ptr, V, rule_ptr, BLOCK: tl.constexpr):
    """Removes tokens by one rule. Returns whether torch surely removes the same."""
    kind = tl.load(rule_ptr)
    keep = tl.load(rule_ptr + tl.where(kind == TOP_K, 4, 1)).to(tl.float32)
    value = tl.load(rule_ptr + 2).to(tl.int32).to(tl.float32, bitcast=True)
    top, total, entropy, usable = weigh(scores_ptr, V, BLOCK)

    centred = kind == TYPICAL  # by the distance of a token's surprise to the entropy
    by_mass = (kind == TOP_P) | centred
    by_weight = (kind == MIN_P) | (kind >= EPSILON)
    doubt = DOUBT * tl.where((kind == ETA) | centred, 32.0, 1.0)  # torch rounds surprises of up to 32
    centre = top + tl.log(total) - entropy
    mass = tl.where(by_mass, tl.maximum(value * total, 1e-30), keep)
    key = least_key(scores_ptr, V, top, ~by_mass, mass, centre, centred, BLOCK)
    kept, weight_from, weight_above, near = around_key(scores_ptr, V, top, key, centre, centred, doubt, BLOCK)
    apart = (kept <= keep) | (tl.abs(weight_above / total - value) >= doubt)
    sure_of_mass = apart & (tl.abs(weight_from / total - value) >= doubt) & (near <= 1) & (kept >= keep)

    least = tl.where(kind == MIN_P, value, value * total)
    if kind == ETA:
        least = tl.minimum(value, tl.sqrt(value) * tl.exp(-entropy)) * total
    likely, doubtful = around_weight(scores_ptr, V, top, least, doubt, BLOCK)
    sure_of_weight = (doubtful == 0) & ((likely >= keep) | (kept <= keep))

    removes = (kind != TOP_P) | (value < 1)
    for begin in range(0, V, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        score = tl.load(scores_ptr + at, mask=at < V, other=REMOVED)
        above = ordered(score, centre, centred).to(tl.int64) >= key
        stays = tl.where(by_weight & (likely >= keep), weight_of(score, top) >= least, above)
        tl.store(scores_ptr + at, tl.where(removes & ~stays, REMOVED, score), mask=at < V)
    tl.debug_barrier()
    return usable & (~removes | ~by_mass | sure_of_mass) & (~by_weight | sure_of_weight)


@triton.jit
def best_token(scores_ptr, draws_ptr, V, SAMPLES: tl.constexpr, BLOCK: tl.constexpr):
    """The token with the largest score, or with SAMPLES the largest weight / draw, the draws being exponentially
    distributed; -1: rounding could decide, or no score is a number.
    """
    top, token, usable = largest(scores_ptr, V, BLOCK)
    if SAMPLES:
        where = tl.zeros((BLOCK,), tl.int32)
        best = tl.zeros((BLOCK,), tl.float32)
        second = tl.zeros((BLOCK,), tl.float32)
        for begin in range(0, V, BLOCK):
            at = begin + tl.arange(0, BLOCK)
            score = tl.load(scores_ptr + at, mask=at < V, other=REMOVED)
            race = weight_of(score, top) / tl.load(draws_ptr + at, mask=at < V, other=1.0)
            second = tl.maximum(second, tl.minimum(best, race))
            where = tl.where(race > best, at, where)
            best = tl.maximum(best, race)
        first = tl.max(best, axis=0)
        token = tl.min(tl.where(best == first, where, V), axis=0)
        usable &= tl.max(tl.where(where == token, second, best), axis=0) < first * (1 - NEAR)
    return tl.where(usable, token, -1)


@triton.jit
def choose_token(
    tokens_ptr, scores_ptr, before_ptr, logits_ptr, draws_ptr, text_ptr, text_stride, table_ptr, V,
    SAMPLES: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Chooses the next token of sequence `program_id(0)`; -1: unsure. scores and before: scratch [programs, V]."""
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    scores_ptr += row * V
    before_ptr += row * V
    text_ptr += row * text_stride
    length, rules = tl.load(table_ptr).to(tl.int32), tl.load(table_ptr + 1).to(tl.int32)
    copy(scores_ptr, logits_ptr + row * V, V, BLOCK)
    sure = row >= 0
    for n in range(rules):
        rule_ptr = table_ptr + RULES_AT + n * RULE_SIZE
        ids_ptr = table_ptr + tl.load(rule_ptr + 3)
        if tl.load(rule_ptr) >= TOP_K:
            sure &= remove(scores_ptr, V, rule_ptr, BLOCK)
        else:
            change(scores_ptr, before_ptr, V, rule_ptr, ids_ptr, row, text_ptr, length, BLOCK)
    token = best_token(scores_ptr, draws_ptr + row * V, V, SAMPLES, BLOCK)
    tl.store(tokens_ptr + row, tl.where(sure, token, -1).to(tl.int64))
