"""The share of the limit of memory and disk that an answer reached."""

from pathlib import Path

import pytest
from helpers.models.offloaded import stream_of, streamed

from labkit.conversation import speed
from labkit.conversation.answer import Answer
from labkit.conversation.speed import floor_share


@pytest.mark.parametrize("steps", [1, 4, 40])
def test_layers_that_the_first_token_finds_in_the_slots_count_as_read_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    """The disk reads 1 MB/s, memory is far faster, and the answer took as long as the disk needs for its bytes."""
    monkeypatch.setattr(speed, "kept_rate_gb_s", lambda threads: 1e6)
    monkeypatch.setattr(speed, "read_rate_gb_s", lambda file: 1e-3)
    engine = streamed("llama", tmp_path)
    layers = stream_of(engine)
    read = steps * layers.bytes_per_step - layers.stream.slots * layers.stream.slot_bytes
    ms = max(read, 1) / 1e3 / steps
    answer = Answer(3, (7,) * (steps + 1), "", "length", ttft_ms=1.0, decode_ms=(ms,) * steps)
    share = floor_share(engine, answer)
    assert share is not None
    assert share == pytest.approx(1.0 if read > 0 else 0.0, abs=1e-2)
