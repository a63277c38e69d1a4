"""The speed of an answer, and its share of the limit of this machine's memory or disk."""

from __future__ import annotations

from labkit.conversation.answer import Answer
from labkit.engine import InferenceEngine
from labkit.engine.engine import FusedEngine
from labkit.engine.team_size import team_size
from labkit.harness.disk import read_rate_gb_s
from labkit.harness.kept_rate import kept_rate_gb_s
from labkit.harness.roofline import count_work, probe_bandwidth
from labkit.harness.stored_weights import stored_by


def floor_share(engine: InferenceEngine, answer: Answer) -> float | None:
    """Share of the limit: least time of a token / measured time of a token.

    The least time is the bytes that a token reads / the highest rate at which the memory of this machine was ever read
    (`labkit.harness.kept_rate`), or that of the GPU, probed now. For a model with streamed layers it is the time of the
    disk if that is longer; layers that were in the slots before the first of these tokens do not count as read. For a
    model with experts on the disk it is the time for the experts that were read, if that is longer.

    None if no rate is known, for a model without a row, and for an answer of fewer than two tokens.
    """
    if answer.per_token_ms is None or not isinstance(engine, FusedEngine):
        return None
    threads, on_cpu = team_size(), engine.device.type == "cpu"
    bandwidth = kept_rate_gb_s(threads) if on_cpu else probe_bandwidth(threads, engine.device)
    if bandwidth is None:
        return None
    work = count_work(
        engine.model_config,
        stored_by(engine),
        1,
        answer.prompt_tokens,
        len(answer.tokens),
        kv_dtype=engine.options.kv_dtype,
    )
    floor_ms = work.floor_ms(bandwidth)
    if (streamed := engine.streamed) is not None and streamed.file is not None:
        in_slots = streamed.stream.slots * streamed.stream.slot_bytes
        read = max(0.0, streamed.bytes_per_step - in_slots / len(answer.decode_ms))
        floor_ms = max(floor_ms, read / read_rate_gb_s(streamed.file) / 1e6)
    if answer.experts is not None and engine.expert_store is not None:
        read = answer.experts.bytes_read / len(answer.decode_ms)
        floor_ms = max(floor_ms, read / read_rate_gb_s(engine.expert_store.path) / 1e6)
    return floor_ms / answer.per_token_ms


def speed_line(answer: Answer, share: float | None = None) -> str:
    """The answer's speed on one line. share: of the physical limit, if it is known."""
    parts = [f"{len(answer.tokens)} token{'' if len(answer.tokens) == 1 else 's'}"]
    if answer.per_token_ms is not None:
        parts += [f"{answer.tokens_per_s:.1f} tokens/s", f"{answer.per_token_ms:.2f} ms per token"]
    if answer.ttft_ms is not None:
        parts.append(f"first token after {answer.ttft_ms:.0f} ms")
    if share is not None:
        parts.append(f"{share:.0%} of the physical limit")
    if (experts := answer.experts) is not None and answer.decode_ms:
        parts.append(
            f"{experts.hit_rate:.0%} of the chosen experts were in memory, "
            f"{experts.bytes_read / len(answer.decode_ms) / 1e6:.3g} MB read per token"
        )
    return ", ".join(parts)
