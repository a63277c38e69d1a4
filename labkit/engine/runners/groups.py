"""A prompt of unequal sequences in groups of sequences: a step computes their tokens and hardly any padding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from labkit.engine.runners.step import CHUNK_ROWS, Chunk, StepInput
from labkit.kernels.types import Rows

LEAST_ROWS = 16  # fewer rows take as long: a pass through the layers reads all weights
LOOK_BACK = 64  # sequences of a group at most, which bounds the search
WORTHWHILE = 0.9  # rows of the groups over rows of the padded batch


def groups_of(lengths: Sequence[int]) -> list[range]:
    """Divides sequences, in their order, into the groups that have the fewest rows in all. A group is padded to its
    longest sequence.
    """
    fewest, begins = [0], [0]  # of the groups of the first sequences, and where the last group begins
    for end in range(1, len(lengths) + 1):
        longest, best = 0, (sum(lengths) * len(lengths) + LEAST_ROWS * end + 1, end)
        for begin in range(end - 1, max(0, end - LOOK_BACK) - 1, -1):
            longest = max(longest, lengths[begin])
            best = min(best, (fewest[begin] + _rows(longest, end - begin), begin))
        fewest.append(best[0])
        begins.append(best[1])
    groups: list[range] = []
    end = len(lengths)
    while end:
        groups.append(range(begins[end], end))
        end = begins[end]
    return groups[::-1]


def padded_groups(step: StepInput) -> list[range]:
    """Groups of the sequences of a new prompt that is padded on the left; empty if groups would not save much."""
    if step.cache.length or step.tokens is None or step.attention_mask is None or step.hidden_states:
        return []
    visible = step.attention_mask != 0
    lengths = visible.sum(1)
    batch, tokens = step.shape
    left_padded = torch.arange(tokens) >= tokens - lengths[:, None]
    if int(lengths.min()) in (0, tokens) or not torch.equal(visible, left_padded):
        return []
    counts = lengths.tolist()
    groups = groups_of(counts)
    rows = sum(_rows(max(counts[group.start : group.stop]), len(group)) for group in groups)
    return groups if rows <= WORTHWHILE * batch * tokens else []


def _rows(longest: int, sequences: int) -> int:
    """The rows of a group, or as many as take its time."""
    return max(LEAST_ROWS, longest * sequences)


def grouped_chunks(step: StepInput, groups: Sequence[range]) -> Iterator[Chunk]:
    """Yields the chunks of one group after the other. All are placed in the cache before the first is yielded."""
    cache, phase, (batch, tokens) = step.cache, step.phase, step.shape
    assert step.tokens is not None
    rows = cache.place(batch, tokens, step.attention_mask, step.position_ids)
    ids, positions = step.tokens.to(torch.int64), rows.positions.view(batch, tokens)
    cache.length = tokens
    for group in groups:
        members = slice(group.start, group.stop)
        size = max(1, CHUNK_ROWS // len(group))
        for begin in range(int(rows.first[members].min()), tokens, size):
            end = min(begin + size, tokens)
            yield Chunk(
                tokens=ids[members, begin:end].contiguous(),
                inputs=None,
                rows=Rows(
                    len(group),
                    end - begin,
                    positions[members, begin:end].contiguous().view(-1),
                    rows.first[members],
                    None,
                    None if rows.key_positions is None else rows.key_positions[members],
                ),
                past=begin,
                keep=max(0, end - max(begin, tokens - step.keep)),
                phase=phase,
                first_sequence=group.start,
            )


def joined_groups(step: StepInput, chunks: Sequence[Chunk], parts: Sequence[Tensor | None]) -> Tensor | None:
    """Returns the results of the chunks as one tensor [B, keep, ...]; None: there are no results. Hidden tokens have
    zeros.
    """
    kept = [(chunk, part) for chunk, part in zip(chunks, parts, strict=True) if part is not None]
    if not kept:
        return None
    batch, tokens = step.shape
    keep = min(step.keep, tokens)
    result = kept[0][1].new_zeros(batch, keep, *kept[0][1].shape[2:])
    for chunk, part in kept:
        end = chunk.past + chunk.rows.tokens - (tokens - keep)
        result[chunk.first_sequence : chunk.first_sequence + chunk.rows.batch, end - chunk.keep : end] = part
    return result
