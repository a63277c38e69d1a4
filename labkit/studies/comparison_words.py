"""The words of a comparison: its claim, outcome and notes. Every number in them comes from the record."""

from __future__ import annotations

from typing import TYPE_CHECKING

from labkit.stages import OUTSIDE
from labkit.studies.frames import limit, names, number, share_words, sides, stage_frame
from labkit.studies.outcome import Notes, Outcome

if TYPE_CHECKING:
    from labkit.harness import Comparison


def speedup_line(comparison: Comparison) -> str:
    """The claim per token with its interval, baseline and verdict, or with a note that it is not trustworthy."""
    baseline, candidate = names(comparison).values()
    return f"{candidate} against {baseline}, per token: {comparison.claim()}"


def outcome(comparison: Comparison) -> Outcome:
    """The result, with the share of the physical limit that each side reaches, its grade and the machine."""
    claim = speedup_line(comparison)
    if any(side.floor_share is not None for side in sides(comparison).values()):
        claim += f"; of the memory limit: {_shares(comparison, ', ')}"
    return Outcome.graded(claim, comparison.trust(), comparison.candidate.environment.machine)


def headline(comparison: Comparison) -> str:
    """The result in one line, and its grade."""
    return comparison.trust().explained(outcome(comparison).claim)


def notes(comparison: Comparison) -> Notes:
    """The result on the points that the notebook asks a reader to notice."""
    tokens = "The two sides produced the same tokens."
    if not comparison.tokens_equal:
        tokens = f"The two sides' tokens differ from new token {comparison.first_difference} on."
    sentences = (
        f"**{speedup_line(comparison)}.** {_noise_sentence(comparison)}",
        _limit_sentence(comparison),
        _stage_sentence(comparison),
        tokens,
    )
    return Notes(tuple(filter(None, sentences)), comparison.remarks)


def _noise_sentence(comparison: Comparison) -> str:
    noise, scatter = comparison.ratio("per_token").noise, comparison.scatter
    words = [f"Scatter of the ratio: {scatter}."] if scatter else []
    if comparison.tells_apart:
        sentence = comparison.tells_apart.sentence
        words.append(f"{sentence[0].upper()}{sentence[1:]}.")
    if comparison.by_rate:
        words.append(f"The ratio follows the rate of the memory: {comparison.by_rate}.")
    if comparison.looks:
        words.append(
            f"{comparison.unit.capitalize()}s were added until there was a verdict or the time was spent; the interval "
            f"holds with {comparison.confidence}, and a claim needs more than {noise:.1%}."
        )
    if words:
        return " ".join(words)
    return f"A side against itself differed by up to {noise:.1%} during this run."


def _limit_sentence(comparison: Comparison) -> str:
    memory_limit = limit(comparison)
    if memory_limit is None:
        return "No bandwidth was probed, so how far both sides are from the limit is unknown."
    return (
        f"A decode step has to read {number(memory_limit.megabytes)} MB. At the "
        f"{memory_limit.bandwidth_gb_s:.1f} GB/s that memory gave between the runs this takes "
        f"{number(memory_limit.floor_ms)} ms; of this limit, {_shares(comparison, ' and ')} are reached."
    )


def _stage_sentence(comparison: Comparison) -> str:
    frame = stage_frame(comparison)
    if not frame.any().all():
        return ""
    frame = frame.drop(OUTSIDE, errors="ignore")
    saved = (frame["baseline"] - frame["candidate"]).sort_values(ascending=False)
    top = frame.loc[saved.index[0]]
    slow, fast = number(top["baseline"]), number(top["candidate"])
    return (
        f"The stage that saves most is {saved.index[0]}: {slow} ms become {fast} ms per token. "
        f"The longest stage of {names(comparison)['candidate']}'s step is {frame['candidate'].idxmax()}."
    )


def _shares(comparison: Comparison, between: str) -> str:
    """The share of the physical limit that each side reaches."""
    both = zip(names(comparison).values(), sides(comparison).values(), strict=True)
    return between.join(f"{name} {share_words(side.floor_share)}" for name, side in both)
