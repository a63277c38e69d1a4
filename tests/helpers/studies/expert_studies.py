"""A study of a mixture of experts with known figures, for tests of figures made from it."""

from helpers.studies.comparisons import environment

from labkit.harness.expert_reads import ExpertReads
from labkit.studies.experts_study import (
    ExpertsInMemory,
    ExpertsStudy,
    RankOfExperts,
    ReadByBatch,
    StudiedMixture,
    TimedPair,
)

LAYERS, EXPERTS, OF_A_ROW, TOKENS = 3, 16, 2, 8


def study() -> ExpertsStudy:
    """Expert e of layer l gets e + l choices. Steps read a tenth fewer experts than even choices would."""
    chosen = tuple(
        tuple((token % EXPERTS, (token + layer + 1) % EXPERTS) for token in range(TOKENS)) for layer in range(LAYERS)
    )
    return ExpertsStudy(
        of=StudiedMixture(model="moe-shape", origin="random weights, seed 0, of the shape moe-shape", dtype="bfloat16",
                          threads=2, skew=2.0, prompt_tokens=32, new_tokens=TOKENS),
        environment=environment(), experts=EXPERTS, of_a_row=OF_A_ROW, expert_bytes=1_500_000, routed_rows=512,
        counts=tuple(tuple(expert + layer for expert in range(EXPERTS)) for layer in range(LAYERS)), chosen=chosen,
        reads=tuple(reads(batch) for batch in (1, 2, 4, 8, 16, 32)),
        ranks=(RankOfExperts(first=0, end=8, steps=reads(4)), RankOfExperts(first=8, end=16, steps=reads(2))),
        on_disk=tuple(in_memory(part) for part in (0.25, 0.5, 0.75)),
        sparse=pair("a dense MLP", "experts", 0.9), routing=pair("one-hot products", "a table", 14.0),
    )  # fmt: skip


def reads(batch: int) -> ReadByBatch:
    read = EXPERTS * (1 - (1 - OF_A_ROW / EXPERTS) ** batch) * 0.9
    return ReadByBatch(batch=batch, by_layer=(read,) * LAYERS, experts_ms=2 * read, sums_ms=12 - 2 * read,
                       step_ms=14 + batch / 8)  # fmt: skip


def in_memory(part: float) -> ExpertsInMemory:
    of, wanted = LAYERS * EXPERTS, 240
    hits = round(part * wanted)
    reads = ExpertReads(wanted=wanted, hits=hits, guessed_hits=hits // 8, guesses=200, right=180,
                        reads=wanted - hits, read_mb=1.5 * (wanted - hits), wasted_mb=9.0, wait_ms=400.0)  # fmt: skip
    return ExpertsInMemory(experts=round(part * of), of=of, step_ms=14 + 40 * (1 - part), wait_ms=40 * (1 - part),
                           read_mb=80 * (1 - part), reads=reads, disk_gb_s=2.5)  # fmt: skip


def pair(slow: str, fast: str, ratio: float) -> TimedPair:
    """Six epochs of two rounds."""
    times = tuple(200.0 + 4 * (place % 3) for place in range(12))
    rounds_us = {slow: tuple(ratio * time for time in times), fast: times[::-1]}
    return TimedPair(environment=environment(), rounds_us=rounds_us, bandwidth_gb_s=None,
                     epochs=tuple(place // 2 for place in range(12)), looks=(3, 6), placed_anew=True)  # fmt: skip
